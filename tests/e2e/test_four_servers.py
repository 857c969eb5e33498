"""Four servers by ssh, from discovery to a lost GPU: no lease moves to another device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_discovering import Servers, servers
from tests.nvml.standin import gpu, library, uuid_of
from tests.redis_server import RedisServer

__all__ = ["library", "servers"]

pytestmark = pytest.mark.e2e


class Commands:
    """`gpu-manager` on one store and inventory, as an operator types it."""

    def __init__(self, servers: Servers, folder: Path, store: str) -> None:
        self.servers = servers
        self.inventory = folder / "servers.toml"
        self.environment = {**servers.environment, "GPU_MANAGER_STORE": store}

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "resource_manager.cli", *arguments]
        environment = {**self.environment, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def gpus(self, server: str) -> list[Any]:
        [found] = self.json("top", server, "--once")
        return list(found["gpus"])


@pytest.fixture
def commands(servers: Servers, tmp_path: Path, embedded_redis: RedisServer) -> Commands:
    return Commands(servers, tmp_path, embedded_redis.fresh_url())


def test_from_discovery_to_a_lost_gpu(commands: Commands, servers: Servers, tmp_path: Path) -> None:
    for number, of_server in enumerate(servers.states):
        of_server.write(*(gpu(10 * number + each) for each in range(4)))

    # The inventory is what the servers say.
    written = commands.run("discover", *servers.hosts, *servers.login, "--output", str(commands.inventory))
    assert written.returncode == 0, written.stderr
    text = re.sub(r"(?m)^cpus = \d+$", "cpus = 8", commands.inventory.read_text())
    commands.inventory.write_text(text)  # for a lease on each GPU, however few CPUs this machine has
    applied = commands.run("apply", "--yes", str(commands.inventory))
    assert applied.returncode == 0, applied.stderr
    verified = commands.run("verify", *servers.login)
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.count(": same: ") == 4

    # A lease on each GPU of the first server.
    names = [f"127.0.0.{number}" for number in range(2, 6)]
    leases = {
        f"t{each}": commands.json("submit", f"t{each}", "--gpus", "1", "--server", names[0])
        for each in range(4)
    }
    assert [lease["gpu_uuids"] for lease in leases.values()] == [[uuid_of(each)] for each in range(4)]

    with reporting(commands, names[0], tmp_path) as report:
        report()
        assert [gpu["closed"] for gpu in commands.gpus(names[0])] == [""] * 4

        # GPU 1 falls off the bus: those behind it move up by one number.
        servers.states[0].write(gpu(0), gpu(2), gpu(3))
        report()
        shifted = commands.gpus(names[0])
        assert [each["closed"].partition("; ")[0] for each in shifted] == ["", "uuid missing", "", ""]
        held = {lease["task_id"]: each["uuid"] for each in shifted for lease in each["leases"]}
        assert held == {name: lease["gpu_uuids"][0] for name, lease in leases.items()}
        after = {lease["task_id"]: lease for lease in commands.json("leases")}
        assert {name: lease["gpu_uuids"] for name, lease in after.items()} == {
            name: lease["gpu_uuids"] for name, lease in leases.items()
        }
        assert [name for name, lease in after.items() if lease["gpu_failed"]] == ["t1"]

        # What is free there now is granted by UUID, and never the lost device.
        assert commands.run("release", "t1").returncode == commands.run("release", "t3").returncode == 0
        report()
        late = commands.json("submit", "late", "--gpus", "1", "--server", names[0])
        assert late["gpu_uuids"] == [uuid_of(3)]
        waits = commands.json("submit", "waits", "--gpus", "1", "--server", names[0])
        assert waits["state"] == "WAITING"

    # The operator takes the server as it is, once nothing runs there.
    different = commands.run("verify", names[0], *servers.login)
    assert (different.returncode, uuid_of(1) in different.stdout) == (1, True)
    refused = commands.run("adopt", names[0], *servers.login)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    assert commands.run("cancel", "waits").returncode == 0
    for name in ("t0", "t2", "late"):
        assert commands.run("release", name).returncode == 0
    adopted = commands.run("adopt", names[0], *servers.login)
    assert (adopted.returncode, adopted.stdout) == (0, f"{names[0]}: 3 GPUs adopted\n")
    assert commands.run("verify", names[0], *servers.login).returncode == 0
    assert [each["uuid"] for each in commands.gpus(names[0])] == [uuid_of(0), uuid_of(2), uuid_of(3)]


class reporting:
    """Service on the store, and a function that sends one report of the server's agent to it."""

    def __init__(self, commands: Commands, server: str, folder: Path) -> None:
        self.commands = commands
        self.server = server
        self.tokens = str(folder / "tokens.json")

    def __enter__(self) -> Any:
        from demo.stack import free_ports
        from tests.e2e.bench import wait_for

        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        create = ["token", "create", "a", "--role", "agent", "--server", self.server, "--tokens", self.tokens]
        self.token = self.commands.run(*create).stdout.strip()
        serve = [sys.executable, "-m", "resource_manager.cli", "serve", "--port", str(port)]
        self.process = subprocess.Popen(
            [*serve, "--tokens", self.tokens], env=self.commands.environment, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: self._send().returncode == 0, 120.0, "the service")
        return self._report

    def _send(self) -> subprocess.CompletedProcess[str]:
        variables = self.commands.servers.states[0].variables
        agent = ["--url", self.url, "agent", "--server", self.server, "--once", "--token", self.token]
        return self.commands.run(*agent, **variables)

    def _report(self) -> None:
        done = self._send()
        assert (done.returncode, done.stderr) == (0, "")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
