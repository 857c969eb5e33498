"""What a client of Redis says and does while Redis is out, refuses, or is another than before."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis

from resource_manager.errors import StoreUnavailableError
from resource_manager.storage.redis.client import RedisClient
from tests.faults.proxy import Proxy
from tests.redis_server import EMBEDDED, RedisServer


@pytest.fixture
def server(own_redis_of_each_release: RedisServer) -> RedisServer:
    """A Redis of each release: they name errors in scripts in different ways."""
    return own_redis_of_each_release


def _asks_for_login(server: RedisServer) -> None:
    server.client().config_set("requirepass", "secret")


def _is_replica(server: RedisServer) -> None:
    server.client().execute_command("REPLICAOF", "127.0.0.1", "1")


def _has_no_primary(server: RedisServer) -> None:
    server.client().config_set("replica-serve-stale-data", "no")
    _is_replica(server)


def _has_too_few_replicas(server: RedisServer) -> None:
    server.client().config_set("min-replicas-to-write", "1")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_asks_for_login, "it requires a login: put user and password into the URL"),
        (_is_replica, "it is read-only: connect to the primary"),
        (_has_no_primary, "it is a replica that has lost its primary: connect to the primary"),
        (_has_too_few_replicas, "it has too few replicas and refuses writes: see min-replicas-to-write"),
    ],
)
def test_a_fault_is_named_with_what_to_do(
    server: RedisServer, fault: Callable[[RedisServer], None], words: str
) -> None:
    with closing(RedisClient.from_url(server.url)) as client, server.client() as operator:
        operator.ping()
        fault(server)
        with pytest.raises(StoreUnavailableError) as caught:
            client.put((client.key("x"), 1, None))
        assert f"{client.address}: {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (redis.ConnectionError("max number of clients reached"), "no connection left: raise maxclients"),
        (redis.exceptions.MovedError("6249 10.0.0.1:6379"), "connect to 10.0.0.1:6379"),
        (redis.exceptions.ClusterDownError("Hash slot not served"), "its Redis Cluster is down"),
        (
            redis.InvalidResponse('Protocol error, got "<" as reply type byte'),
            "it is no Redis: check its port",
        ),
        (
            redis.ConnectionError("Error while reading from h:1 : (104, 'Connection reset by peer')"),
            "if it has TLS, its address begins with rediss://",
        ),
        (redis.ResponseError("unknown command 'SENTINEL'"), "it is no sentinel: name the sentinels"),
        (redis.ResponseError("unknown command 'EVALSHA', with"), "it has no EVALSHA: name sentinels as"),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), "it is still loading its data"),
        (
            redis.AuthenticationError("invalid username-password pair or user is disabled."),
            "it refused the login: check user and password in the URL",
        ),
        (
            redis.ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL"),
            "a script keeps it busy: wait for it, or end it by SCRIPT KILL in redis-cli",
        ),
    ],
)
def test_an_error_without_its_code_is_named_with_what_to_do(error: redis.RedisError, words: str) -> None:
    client = RedisClient.from_url("redis://localhost:1/0")
    with pytest.raises(StoreUnavailableError, match=words), client.reporting():
        raise error


def test_a_connection_to_what_is_a_replica_by_now_is_made_anew(tmp_path: Path) -> None:
    """As behind the name of a managed Redis, which leads to the new primary after a fail-over."""
    servers = []
    for name in "ab":
        (tmp_path / name).mkdir()
        servers.append(RedisServer(EMBEDDED, tmp_path / name))
    address = tmp_path / "primary"
    address.symlink_to(servers[0].socket)
    try:
        with closing(RedisClient.from_url(f"unix://{address}")) as client:
            client.put((client.key("x"), 1, None))
            _is_replica(servers[0])
            with pytest.raises(StoreUnavailableError, match="read-only"):
                client.put((client.key("x"), 2, None))
            address.unlink()
            address.symlink_to(servers[1].socket)
            client.put((client.key("x"), 3, None))
        assert servers[1].client().get("{gpu_manager}:x") == b"3"
    finally:
        for server in servers:
            server.stop(signal.SIGKILL)


@pytest.fixture
def mute() -> Iterator[Mute]:
    mute = Mute()
    yield mute
    mute.close()


class Mute:
    """A server that takes connections and never says a word; `connections` counts them."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.connections.append(self._listener.accept()[0])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._listener, *self.connections):
            each.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://{}/0?socket_timeout=0.1", "it did not answer within 0.1 s"),
        (
            "rediss://{}/0?socket_timeout=0.1&socket_connect_timeout=0.1",
            "if it has no TLS, its address begins with redis://",
        ),
    ],
)
def test_a_server_that_never_answers_is_asked_once(mute: Mute, url: str, words: str) -> None:
    with closing(RedisClient.from_url(url.format(mute.place))) as client:
        with pytest.raises(StoreUnavailableError, match=words):
            client.time()
        assert len(mute.connections) == 1


@pytest.mark.thorough
def test_a_server_that_answers_no_more_is_asked_on_one_more_connection(own_redis: RedisServer) -> None:
    proxy = Proxy(str(own_redis.socket))
    url = f"{proxy.url('x')}&socket_timeout=1.5"
    with closing(proxy), closing(RedisClient.from_url(url)) as client:
        client.time()
        proxy.partitioned = True
        with pytest.raises(StoreUnavailableError, match=r"it did not answer within 1\.5 s"):
            client.time()
        assert proxy.connections == 2
        proxy.partitioned = False
        client.time()


@pytest.mark.thorough
def test_a_wait_is_made_of_parts_below_the_timeout_that_the_url_gives(own_redis: RedisServer) -> None:
    with closing(RedisClient.from_url(f"{own_redis.url}?socket_timeout=1.5")) as client:
        assert client.block_on(client.key("bell"), 4.0) is None


def test_more_threads_may_wait_than_the_driver_makes_connections(own_redis: RedisServer) -> None:
    with closing(RedisClient.from_url(own_redis.url)) as client:
        failed: list[StoreUnavailableError] = []

        def wait(number: int) -> None:
            try:
                client.block_on(client.key(f"bell:{number}"), 30)
            except StoreUnavailableError as error:
                failed.append(error)

        threads = [threading.Thread(target=wait, args=(number,)) for number in range(120)]
        for thread in threads:
            thread.start()
        with own_redis.client() as operator:
            for number in range(len(threads)):
                operator.lpush(client.key(f"bell:{number}"), "ring")
        for thread in threads:
            thread.join()
        assert not failed
