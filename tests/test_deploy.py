"""Units of service and agent, and their page: its commands install them, and what they start runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.stack import free_ports
from resource_manager.cli.serving import serve
from resource_manager.settings import Settings
from tests.e2e.bench import wait_for
from tests.nvml.standin import State, library, state, uuid_of
from tests.redis_server import RedisServer

__all__ = ["library", "state"]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
AGENT = ROOT / "resource_manager" / "agent" / "gpu-manager-agent.service"
DEPLOY = ROOT / "resource_manager" / "deploy" / "systemd"
UNITS = [*sorted(DEPLOY.glob("*.service")), AGENT]
INSTALLED = "/opt/gpu-manager/bin/"
HERE = f"{Path(sys.executable).parent}/"
ANALYZE = shutil.which("systemd-analyze")
EXPOSURE = {"gpu-manager.service": 15, "gpu-manager-agent.service": 30}
"""Largest exposure that systemd-analyze may find, in tenths: 0 is none, 100 no hardening at all."""


def blocks() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder into which the page's commands installed all files, in place of /."""
    uuids = json.dumps([uuid_of(0), uuid_of(1)])
    (tmp_path / "servers.toml").write_text(
        f'[[servers]]\nname = "gpu-a"\ncpus = 8\n[[servers.gpus]]\ncount = 2\nuuids = {uuids}\n'
    )
    for block in blocks():
        for line in block.splitlines():
            assert line.startswith(("sudo ", f"{INSTALLED}gpu-manager "))
            if "gpu-manager files " in line:
                subprocess.run(line.replace(INSTALLED, HERE).split(), check=True, cwd=tmp_path)
            if not line.startswith("sudo install "):
                continue
            words = [word if "/" not in word[:1] else f"{tmp_path}{word}" for word in shlex.split(line)[1:]]
            (tmp_path / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
            subprocess.run(words, check=True, cwd=tmp_path)
    return tmp_path


def test_the_page_installs_every_file_of_the_folder(root: Path) -> None:
    for name in ("gpu-manager.service",):
        assert (root / "etc/systemd/system" / name).read_text() == (DEPLOY / name).read_text()
    for name in ("service.env",):
        installed = root / "etc/gpu-manager" / name
        assert installed.read_text() == (DEPLOY / name).read_text()
        assert installed.stat().st_mode & 0o777 == 0o600
    assert {unit.name for unit in UNITS} == EXPOSURE.keys()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit_and_finds_it_hardened(unit: Path, tmp_path: Path) -> None:
    if ANALYZE is None:
        pytest.skip("needs systemd-analyze (Debian: systemd)")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(INSTALLED, HERE))
    verified = subprocess.run([ANALYZE, "verify", copy], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    command = [ANALYZE, "security", "--offline=true", f"--threshold={EXPOSURE[unit.name]}", str(copy)]
    rated = subprocess.run(command, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout.splitlines()[-1]


def test_the_service_sees_the_id_by_which_the_processes_of_a_machine_are_known() -> None:
    """Else a jump of the store's clock over its restart is not seen (storage/clock.py)."""
    unit = (DEPLOY / "gpu-manager.service").read_text()
    assert not re.search(r"^(ProcSubset=pid|InaccessiblePaths=.*/proc)", unit, re.MULTILINE)


def test_systemd_accepts_the_unit_with_secrets_that_only_root_may_read(tmp_path: Path) -> None:
    [drop_in] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    given = dict(re.findall(r"^Environment=(\w+)=(.*)$", drop_in, re.MULTILINE))
    assert given.keys() == {param.envvar for param in serve.params if "secret" in str(param.envvar).lower()}
    credentials = re.findall(r"^LoadCredential=([\w-]+):/etc/gpu-manager/", drop_in, re.MULTILINE)
    assert [*given.values()] == [f"/run/credentials/gpu-manager.service/{name}" for name in credentials]
    if ANALYZE is None:
        pytest.skip("needs systemd-analyze (Debian: systemd)")
    copy = tmp_path / "gpu-manager.service"
    copy.write_text((DEPLOY / copy.name).read_text().replace(INSTALLED, HERE).replace("[Service]\n", drop_in))
    verified = subprocess.run([ANALYZE, "verify", copy], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def settings_in(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {
        name: shlex.split(value)[0] if value else ""
        for name, _, value in (line.partition("=") for line in lines)
    }


def command_of(unit: str, environment: dict[str, str]) -> list[str]:
    """Return what the unit starts, as systemd splits it: `$NAME` into words, `${NAME}` as one."""
    found = re.search(r"^ExecStart=(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    assert found is not None
    words: list[str] = []
    for word in found[1].replace(INSTALLED, HERE).split():
        if word.startswith("${"):
            words.append(environment[word[2:-1]])
        elif word.startswith("$"):
            words += shlex.split(environment[word[1:]])
        else:
            words.append(word)
    return words


def test_the_settings_exist() -> None:
    service = settings_in(DEPLOY / "service.env")
    fields = {f"GPU_MANAGER_{name.upper()}" for name in Settings.model_fields}
    assert set(service) - {"SERVE_OPTIONS"} <= fields


def token_for(name: str, environment: dict[str, str]) -> str:
    """Return the token that the page makes for that holder."""
    [line] = [line for line in "".join(blocks()).splitlines() if f"token create {name} " in line]
    words = line.replace("--store redis://localhost:6379/0", "").split()
    command = [words[0].replace(INSTALLED, HERE), *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def service(root: Path, embedded_redis: RedisServer) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield the address of the service that the unit starts, its environment, and an operator's token."""
    [port] = free_ports(1)
    settings = settings_in(root / "etc/gpu-manager/service.env")
    settings["GPU_MANAGER_STORE"] = embedded_redis.fresh_url()
    settings["SERVE_OPTIONS"] = settings["SERVE_OPTIONS"].replace("5000", str(port))
    environment = {**os.environ, "HOME": str(root), **settings}
    applied = [f"{HERE}gpu-manager", "apply", "--yes", str(root / "servers.toml")]
    assert " ".join(applied[1:3]) in PAGE
    subprocess.run(applied, env=environment, check=True)
    operator = token_for("olga", environment)
    process = subprocess.Popen(command_of("gpu-manager.service", settings), env=environment)
    url = f"http://127.0.0.1:{port}"

    def is_healthy() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(is_healthy, 120.0, "the service")
        yield url, environment, operator
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_service_and_agent_run_with_the_files_that_the_page_installs(
    service: tuple[str, dict[str, str], str], root: Path, state: State
) -> None:
    url, environment, operator = service
    created = [f"{HERE}gpu-manager", "token", "create", "gpu-a", "--role", "agent", "--server", "gpu-a"]
    token = subprocess.run(created, env=environment, check=True, capture_output=True, text=True).stdout
    settings = {"GPU_MANAGER_URL": url, "GPU_MANAGER_AGENT_TOKEN": token.strip()}
    settings |= {"GPU_MANAGER_SERVER": "gpu-a", "STATE_DIRECTORY": str(root)}
    agent = re.search(r"^ExecStart=/usr/bin/python3 (.*)$", AGENT.read_text(), re.MULTILINE)
    assert agent is not None
    process = subprocess.Popen([sys.executable, *agent[1].split()], env={**os.environ, **settings})
    try:
        wait_for(lambda: list(root.glob("agent-gpu-a-*.mark")), 60.0, "the first report")
    finally:
        process.terminate()
        process.wait(10)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/api/gpus", timeout=10)
    shown = subprocess.run(
        [f"{HERE}gpu-manager", "--url", url, "--token", operator, "top", "--once", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    [found] = json.loads(shown.stdout)
    assert (found["server_name"], found["watched"]) == ("gpu-a", True)
    assert [gpu["temperature_c"] for gpu in found["gpus"]] == [34, 34]
