"""Agents installed by one command over a real sshd; a stand-in for systemctl starts the unit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from demo.stack import answers, free_ports
from resource_manager import __version__
from tests.e2e.bench import wait_for
from tests.e2e.servers import SSHServer
from tests.nvml.standin import State, library, state
from tests.redis_server import RedisServer

__all__ = ["library", "state"]

BWRAP = shutil.which("bwrap")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BWRAP is None or os.geteuid() != 0, reason="needs bubblewrap and root"),
]

PROGRAM = [sys.executable, "-m", "resource_manager.cli"]

SYSTEMCTL = """#!/usr/bin/env python3
import os, signal, subprocess, sys
if sys.argv[1] != "restart":
    sys.exit(0 if sys.argv[1:] in (["daemon-reload"], ["enable", "gpu-manager-agent.service"]) else 1)
unit = dict(
    line.partition("=")[::2]
    for line in open("/etc/systemd/system/gpu-manager-agent.service").read().splitlines()
    if line.startswith(("ExecStart=", "Environment=", "EnvironmentFile="))
)
words = [*unit["Environment"].split(), *open(unit["EnvironmentFile"]).read().splitlines()]
given = {name: value for name, value in os.environ.items() if "NVML" in name}
given |= {name: value.strip('"') for name, _, value in (word.partition("=") for word in words)}
if os.path.exists("/opt/pid"):
    os.killpg(int(open("/opt/pid").read().split()[-1]), signal.SIGTERM)
agent = subprocess.Popen(
    unit["ExecStart"].split(), env={**given, "STATE_DIRECTORY": "/opt"}, start_new_session=True,
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=open("/opt/log", "a"),
)
open("/opt/pid", "a").write(f"{agent.pid} ")
"""


class Server(SSHServer):
    """Server whose folders of root are its own."""

    def __init__(self, home: Path, devices: State) -> None:
        programs = home / "programs"
        programs.mkdir(parents=True)
        super().__init__(home, variables={"PATH": f"{programs}:/usr/bin:/bin", **devices.variables})
        (programs / "systemctl").write_text(SYSTEMCTL)
        (programs / "systemctl").chmod(0o755)
        self.opt = home / "opt"
        own = {"/opt": self.opt, "/etc/gpu-manager": home / "etc", "/etc/systemd/system": home / "units"}
        for inside, outside in own.items():
            outside.mkdir()
            Path(inside).mkdir(parents=True, exist_ok=True)
            self.prefix += ("--bind", str(outside), inside)
        self.prefix = (str(BWRAP), "--dev-bind", "/", "/", *self.prefix)

    def agents(self) -> list[int]:
        pids = self.opt / "pid"
        return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


@pytest.fixture
def servers(tmp_path: Path, state: State) -> Iterator[list[Server]]:
    made = [Server(tmp_path / name, state) for name in ("a", "b")]
    made[1].share_key(made[0])
    for each in made:
        each.start()
    yield made
    for each in made:
        for pid in each.agents()[-1:]:
            with suppress(ProcessLookupError):  # it did not start
                os.killpg(pid, signal.SIGKILL)
        for process in [*psutil.Process(each.process.pid).children(recursive=True), each.process]:
            process.kill()
        each.process.wait()


def test_one_command_installs_the_agents_of_all_servers_and_sees_their_reports(
    servers: list[Server], tmp_path: Path, embedded_redis: RedisServer
) -> None:
    names = ["a", "b"]
    inventory = "".join(
        f'[[servers]]\nname = "{name}"\naddress = "127.0.0.1:{each.port}"\ncpus = 8\ngpus = 2\n'
        for name, each in zip(names, servers, strict=True)
    )
    (tmp_path / "servers.toml").write_text(inventory)
    store, [port] = embedded_redis.fresh_url(), free_ports(1)
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    keys = [(each.home / "host_key.pub").read_text() for each in servers]
    known = [f"[127.0.0.1]:{each.port} {key}" for each, key in zip(servers, keys, strict=True)]
    (home / ".ssh" / "known_hosts").write_text("".join(known))
    environment = {**os.environ, "HOME": str(home), "GPU_MANAGER_STORE": store}

    def call(*words: str) -> tuple[int, str]:
        done = subprocess.run([*PROGRAM, *words], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert call("apply", "--yes", str(tmp_path / "servers.toml"))[0] == 0
    assert call("token", "create", "olga", "--role", "operator")[0] == 0
    service = subprocess.Popen([*PROGRAM, "serve", "--port", str(port)], env=environment)
    try:
        wait_for(lambda: answers(port), 60.0, "the service")
        url = f"http://127.0.0.1:{port}"
        where = ["--service", "http://127.0.0.1:1", "--service", url, "--user", "root", "--key"]
        code, said = call("agent", "install", "--all", *where, str(servers[0].key))
        assert (code, said) == (0, "".join(f"{name}: agent {__version__} reports\n" for name in names))
        _, shown = call("agent", "list", "--json")
        assert [row["agent_version"] for row in json.loads(shown)] == [__version__] * 2
        code, said = call("agent", "install", "a", *where, str(servers[0].key))
        assert code == 0, said
        held = json.loads(call("token", "list", "--json")[1])
        assert sorted(each["server"] for each in held if each["role"] == "agent") == names, (
            "the old one ended"
        )
        assert (servers[0].home / "etc" / "agent.env").stat().st_mode & 0o777 == 0o600
        (servers[1].home / "programs" / "systemctl").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
        code, said = call("agent", "install", "b", *where, str(servers[0].key))
        assert (code, said) == (3, "Error: b: systemctl daemon-reload: no bus\n")
        code, said = call("agent", "install", "--all", *where, str(servers[0].key))
        assert (code, said.splitlines()) == (
            3,
            [
                f"a: agent {__version__} reports",
                "Error: b: systemctl daemon-reload: no bus",
                "1 of 2 servers without a report; once mended, agent install b",
            ],
        )
        held = json.loads(call("token", "list", "--json")[1])
        assert [each["server"] for each in held].count("b") == 3, "those that its agent may have go on"
        assert [each["server"] for each in held].count("a") == 1
        code, said = call("agent", "install", "c", *where, str(servers[0].key))
        assert (code, "server 'c' is not in the inventory" in said) == (2, True), said
    finally:
        service.terminate()
        service.wait(30)
