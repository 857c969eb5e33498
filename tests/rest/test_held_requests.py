"""Requests that the service holds until leases change: without a thread each, and so many a caller."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from resource_manager import GPUResourceManager
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.held_requests import MAX_HELD_PER_CALLER
from resource_manager.rest.state_follower import StateFollower
from tests.eventually import wait_for
from tests.listening import served, serving
from tests.redis_server import RedisServer

THREADS = 4
HELD = 3 * THREADS
PATH = "/api/leases/changes"


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://", inventory=default_inventory(2)) as manager:
        manager.submit("holds", 8)
        yield manager


@pytest.fixture
def url(manager: GPUResourceManager, tmp_path: Path) -> Iterator[str]:
    with served(manager, tmp_path, THREADS) as url:
        yield url


def waits(url: str, after: int, timeout_s: float = 20.0, **more: str) -> httpx.Response:
    return httpx.get(
        f"{url}{PATH}", params={"after": after, "timeout_s": timeout_s, **more}, timeout=30
    ).raise_for_status()


def wait_until_held(url: str, count: int) -> None:
    held = f"gpu_manager_http_held_requests {float(count)}"
    wait_for(lambda: held in httpx.get(f"{url}/metrics").text, what=f"{count} held requests")


def test_more_requests_than_threads_are_held_while_others_are_answered(
    url: str, manager: GPUResourceManager
) -> None:
    version = waits(url, -1, 0.0).json()["version"]
    with ThreadPoolExecutor(HELD) as pool:
        held = [pool.submit(waits, url, version) for _ in range(HELD)]
        wait_until_held(url, HELD)
        assert httpx.get(f"{url}/api/status").is_success
        released_at = time.monotonic()
        manager.release("holds")  # in this process: the service is told by its own commit
        answers = [each.result(30).json() for each in held]
        assert time.monotonic() - released_at < 5.0
    assert [each["ended"] for each in answers] == [["holds"]] * HELD
    wait_until_held(url, 0)


def test_who_waits_for_a_grant_is_told_of_it_at_once_by_a_held_request(
    url: str, manager: GPUResourceManager
) -> None:
    for name in ("too", "next", "last"):
        manager.submit(name, 8)
    with ServiceClient(url) as client, ThreadPoolExecutor(3) as pool:
        next_one, last = (pool.submit(client.wait, name, 25.0) for name in ("next", "last"))
        path = f"{url}/api/task?timeout_s=25&task_id="
        named = pool.submit(httpx.get, path + manager.named("last")["short_id"], timeout=30)
        wait_until_held(url, 3)
        begun_at = time.monotonic()
        manager.release("holds")
        granted = next_one.result(30)
        manager.cancel("last")
        assert last.result(30) is None
        assert named.result(30).status_code == 404
        assert time.monotonic() - begun_at < 5.0
    assert granted is not None
    assert granted["state"] == "RUNNING"


def test_who_waits_for_a_grant_is_told_its_place_at_its_time(url: str, manager: GPUResourceManager) -> None:
    for name in ("too", "next"):
        manager.submit(name, 8)
    asked: list[httpx.Request] = []

    class Counted(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return super().handle_request(request)

    with ServiceClient(url, transport=Counted()) as client:
        begun_at = time.monotonic()
        found = client.wait("next", 0.5)
    assert 0.5 <= time.monotonic() - begun_at < 10
    assert len(asked) == 1
    assert found is not None
    assert (found["state"], found.get("position")) == ("WAITING", 1)


def test_held_requests_take_no_place_among_the_connections_that_a_service_has(
    manager: GPUResourceManager, tmp_path: Path
) -> None:
    with served(manager, tmp_path, THREADS, max_connections=4) as url, ThreadPoolExecutor(HELD) as pool:
        version = waits(url, -1, 0.0).json()["version"]
        held = [pool.submit(waits, url, version) for _ in range(HELD)]
        wait_until_held(url, HELD)
        assert httpx.get(f"{url}/api/status", timeout=5).is_success
        manager.release("holds")
        assert all(each.result(30).json()["ended"] == ["holds"] for each in held)


def test_what_another_process_does_is_told_too(embedded_redis: RedisServer, tmp_path: Path) -> None:
    store = embedded_redis.fresh_url()
    with (
        GPUResourceManager.from_url(store, inventory=default_inventory(2)) as manager,
        GPUResourceManager.from_url(store) as other,
        served(manager, tmp_path, THREADS) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        held = pool.submit(waits, url, waits(url, -1, 0.0).json()["version"])
        wait_until_held(url, 1)
        other.submit("theirs", 2)
        assert [lease["task_id"] for lease in held.result(30).json()["leases"]] == ["theirs"]


def test_a_held_request_is_answered_at_its_time_though_nothing_changed(url: str) -> None:
    version = waits(url, -1, 0.0).json()["version"]
    begun_at = time.monotonic()
    answer = waits(url, version, 0.5).json()
    assert 0.5 <= time.monotonic() - begun_at < 10
    assert (answer["version"], answer["leases"], answer["ended"]) == (version, [], [])


def test_connections_that_the_loop_closes_while_they_are_held_keep_nobody_waiting(
    manager: GPUResourceManager, tmp_path: Path
) -> None:
    with serving(manager, tmp_path, THREADS) as server, ThreadPoolExecutor(2) as pool:
        url = f"http://127.0.0.1:{server.effective_port}"
        version = waits(url, -1, 0.0).json()["version"]
        closed = pool.submit(waits, url, version)
        wait_until_held(url, 1)
        for channel in list(server.active_channels.values()):
            server.trigger.pull_trigger(channel.handle_close)
        with pytest.raises(httpx.RemoteProtocolError):
            closed.result(10)
        held = pool.submit(waits, url, version)
        wait_until_held(url, 1)
        manager.release("holds")
        assert held.result(10).json()["ended"] == ["holds"]


def test_one_who_cannot_be_told_of_a_look_keeps_no_other_from_it(manager: GPUResourceManager) -> None:
    follower = StateFollower(manager.store, interval_s=0.01)
    told: list[Any] = []
    follower.on_look(lambda: told[0].nowhere)
    follower.on_look(lambda: told.append(len(told)))
    follower.follow()
    try:
        wait_for(lambda: len(told) > 2)
    finally:
        follower.close()


def test_who_waits_for_a_look_is_told_that_there_are_no_more(manager: GPUResourceManager) -> None:
    follower = StateFollower(manager.store, interval_s=0.0)
    told: list[bool] = []
    follower.on_look(lambda: told.append(follower.stopped))
    follower.follow()
    wait_for(lambda: told)
    follower.close()
    assert told[-1]


def test_a_caller_holds_so_many_requests_and_gets_them_back_when_it_hangs_up(
    url: str, manager: GPUResourceManager
) -> None:
    for name in ("too", "next"):
        manager.submit(name, 8)
    path = f"{PATH}?after={waits(url, -1, 0.0).json()['version']}&timeout_s=25"
    parts = urlsplit(url)
    with ExitStack() as connections:
        for _ in range(MAX_HELD_PER_CALLER):
            connection = socket.create_connection((parts.hostname, parts.port))
            connections.enter_context(connection)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        wait_until_held(url, MAX_HELD_PER_CALLER)
        refused = httpx.get(url + path)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
        waits_for_it = httpx.get(f"{url}/api/task?task_id=next&exact=true&timeout_s=25", timeout=5)
        assert waits_for_it.json()["state"] == "WAITING"  # at once: who waits is refused nothing
    wait_until_held(url, 0)
