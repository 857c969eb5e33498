"""The client of Redis: its URLs and rights, how it waits for an answer, and when it asks again."""

from __future__ import annotations

import select
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis

from resource_manager import GPUResourceManager
from resource_manager.core.cluster import ClusterState
from resource_manager.errors import SettingsError, StoreRefusedError, StoreUnavailableError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.storage import open_store
from resource_manager.storage.redis import client as redis_client
from resource_manager.storage.redis.client import (
    MAX_TRIES,
    RIGHTS,
    SOCKET_TIMEOUT_S,
    RedisClient,
    blocking_read,
)
from resource_manager.storage.redis.store import RedisStore
from resource_manager.storage.reports import Sighting
from tests.builders import nodes
from tests.redis_server import RedisServer


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "nonsense",
        "http://localhost:6379/0",
        "redis://localhost:port/0",
        "redis://localhost:6379/zero",
        "redis://:secret@localhost:6379/zero",
        "unix://",
        "redis://localhost:6379/0?socket_timeout=soon",
        "redis://localhost:6379/0?colour=red",
        "rediss://localhost:6379/0?ssl_cert_reqs=sometimes",
        "redis+sentinel://localhost:26379",
        "redis+sentinel://localhost/mymaster",
        "redis+sentinel://a:1,b/mymaster",
        "redis+sentinel://a:1/mymaster/x",
        "redis+sentinel://a:1/mymaster/0?colour=red",
        "redis://:pass/secret@localhost:6379/0",  # pragma: allowlist secret
        "redis+sentinel://:secret/word@localhost:6379/mymaster",  # pragma: allowlist secret
    ],
)
def test_a_wrong_url_is_one_clear_line(wrong: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_store(wrong)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_answers_are_bytes_for_every_url(embedded_redis: RedisServer) -> None:
    with GPUResourceManager.from_url(f"{embedded_redis.fresh_url()}&decode_responses=true") as manager:
        assert manager.leases() == []


def driver_of(server: RedisServer, kind: Any) -> redis.Redis:
    """Return a driver with connections of that kind to a server."""
    pool = redis.ConnectionPool(kind, path=str(server.socket), socket_timeout=SOCKET_TIMEOUT_S)
    return redis.Redis(connection_pool=pool)


@pytest.mark.parametrize(("quick_s", "times"), [(3600.0, 2), (1e-9, 1), (0.0, 0)])
def test_a_client_waits_awake_for_an_answer_only_after_a_quick_one(
    embedded_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, quick_s: float, times: int
) -> None:
    """Before the first answer it takes the server for quick, unless none is."""
    monkeypatch.setattr(redis_client, "QUICK_S", quick_s)
    client = RedisClient.from_url(embedded_redis.fresh_url())
    poll, waits = select.poll, []

    def counted() -> Any:
        waits.append(time.monotonic())
        return poll()

    monkeypatch.setattr(select, "poll", counted)
    client.ask(("PING",))
    client.ask(("PING",))
    assert len(waits) == times
    client.close()


def test_a_client_waits_asleep_where_there_is_no_poll(
    embedded_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "QUICK_S", 3600.0)
    client = RedisClient.from_url(embedded_redis.fresh_url())
    monkeypatch.delattr(select, "poll")  # as on Windows
    assert client.ask(("PING",)) == [b"PONG"]
    client.close()


def test_a_client_that_waits_awake_falls_asleep(
    embedded_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "QUICK_S", 0.05)  # also a busy server answers as soon as that
    client = RedisClient.from_url(embedded_redis.fresh_url())
    client.ask(("PING",))  # which connects, too
    client.ask(("PING",))
    before_s = time.process_time()
    assert client.block_on(client.key("nothing"), 0.3) is None  # Redis answers after 0.3 s
    assert client.block_on(client.key("nothing"), 0.3) is None
    assert time.process_time() - before_s < 0.2
    client.close()


def test_a_client_whose_connection_broke_has_one_again(own_redis: RedisServer) -> None:
    client = RedisClient.from_url(own_redis.url)
    operator = redis.Redis.from_url(own_redis.url)
    for _ in range(3):
        [number] = client.ask(("CLIENT", "ID"))
        operator.client_kill_filter(_id=number)
        assert client.ask(("CLIENT", "ID"))[0] > number
    assert len(operator.client_list()) == 2  # with the operator's
    operator.close()
    client.close()


def test_a_process_of_one_thread_has_one_connection(own_redis: RedisServer) -> None:
    with closing(RedisStore(RedisClient.from_url(own_redis.url))) as store, own_redis.client() as operator:
        store.initialise(ClusterState(nodes("abc")).snapshot())
        store.refresh(None)
        store.reports.put_sighting("this machine", Sighting(store.now()))
        store.reports.put("a", b"report", b"record", 60)
        assert store.reports.sightings().keys() == {"this machine"}
        assert store.reports.reports(["a"]) == {"a": b"report"}
        assert len(operator.client_list()) == 2  # with the operator's


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9, 0.0004, 0.001, 0.0015, 0.003])
@pytest.mark.parametrize("server", ["embedded_redis", "system_redis"])
def test_the_shortest_blocking_read_ends(
    request: pytest.FixtureRequest, server: str, timeout_s: float
) -> None:
    with closing(RedisClient.from_url(request.getfixturevalue(server).fresh_url())) as client:
        assert client.ask(blocking_read(client.key("nothing"), timeout_s)) == [None]


@pytest.mark.parametrize("broken", [1, MAX_TRIES - 1, MAX_TRIES])
def test_commands_are_sent_again_a_few_times_if_connections_break(
    embedded_redis: RedisServer, broken: int
) -> None:
    times = 0

    class Breaking(redis.UnixDomainSocketConnection):
        def read_response(self, *args: Any, **options: Any) -> Any:
            nonlocal times
            answer = super().read_response(*args, **options)
            if answer == b"PONG":
                times += 1
                if times <= broken:
                    raise redis.exceptions.ConnectionError("cut off")
            return answer

    client = RedisClient(driver_of(embedded_redis, Breaking), "redis")
    with pytest.raises(redis.exceptions.ConnectionError) if broken == MAX_TRIES else nullcontext():
        assert client.ask(("PING",)) == [b"PONG"]
    assert times == min(broken + 1, MAX_TRIES)
    client.close()


@pytest.mark.thorough
def test_the_rights_in_the_documentation_are_necessary_and_sufficient(own_redis: RedisServer) -> None:
    rights = ["~{gpu_manager}:*", *RIGHTS.split()]
    assert " ".join(rights) in Path("docs/stores.md").read_text(encoding="utf-8")
    url = own_redis.url
    operator = redis.Redis.from_url(url)
    login = "worker:secret@"  # pragma: allowlist secret
    as_worker = url.replace("unix://", f"unix://{login}")

    def allow(*some: str) -> None:
        operator.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">secret", *some)

    allow(*rights)
    with GPUResourceManager.from_url(as_worker, inventory=default_inventory()) as manager:
        assert manager.allocate_resources("t", 2, 1)
        lock = manager.store.lock()
        assert lock.acquire(1.0)
        lock.release()
        assert manager.history()
        assert manager.release_resources("t")
        for missing in "+@write", "+time", "+info":
            allow(*(right for right in rights if right != missing))
            with pytest.raises(StoreRefusedError, match="its user lacks rights"):
                manager.allocate_resources("u", 2, 1)


def test_the_password_stays_out_of_errors() -> None:
    store = open_store("redis://worker:secret@localhost:1/0")
    with pytest.raises(StoreUnavailableError, match="redis://worker@localhost:1/0") as caught:
        store.refresh(None)
    assert "secret" not in str(caught.value)


def test_sentinels_that_do_not_answer_are_one_clear_line() -> None:
    store = open_store("redis+sentinel://:secret@localhost:1/mymaster/0")
    with pytest.raises(StoreUnavailableError) as caught:
        store.refresh(None)
    assert "/mymaster/0: no sentinel that answers knows the primary: check" in str(caught.value)
    assert "<" not in str(caught.value)
    assert "secret" not in str(caught.value)
