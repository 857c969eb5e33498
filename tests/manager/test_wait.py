"""`GPUResourceManager.wait`: a pending request's owner sleeps until it is granted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from resource_manager import MemoryStore
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.settings import Settings
from tests.builders import Clock, granted_lease
from tests.redis_server import RedisServer


class SleptOn(MemoryStore):
    """A store that tells when somebody sleeps on it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.slept_on = threading.Event()

    def await_decision(self, *args: object) -> bool:
        self.slept_on.set()
        return super().await_decision(*args)  # type: ignore[arg-type]


@pytest.fixture
def store(clock: Clock) -> SleptOn:
    return SleptOn(clock)


@pytest.fixture
def manager(store: SleptOn) -> GPUResourceManager:
    manager = GPUResourceManager(Settings(store="memory://"), store=store, inventory=default_inventory(1))
    manager.submit("holder", 8, ttl=60)
    return manager


def test_a_release_wakes_the_next_holder(manager: GPUResourceManager, store: SleptOn) -> None:
    manager.submit("next", 8)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(manager.wait, "next", 30.0)
        assert store.slept_on.wait(30)
        manager.release("holder")
        found = waiting.result(30)
    lease = granted_lease(found)
    assert (lease["state"], lease["gpu_ids"]) == ("RUNNING", list(range(8)))


def test_a_lease_that_is_due_expires_meanwhile(
    manager: GPUResourceManager, store: SleptOn, clock: Clock
) -> None:
    manager.submit("next", 8)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(manager.wait, "next", 30.0)
        assert store.slept_on.wait(30)
        clock.now += 61
        found = waiting.result(30)
    assert found is not None
    assert found["state"] == "RUNNING"


def test_its_time_ends_with_the_queue_entry(manager: GPUResourceManager) -> None:
    manager.submit("next", 8)
    found = manager.wait("next", 0.01)
    assert found is not None
    assert (found["state"], found["task_id"]) == ("WAITING", "next")


def test_what_is_not_pending_is_not_waited_for(manager: GPUResourceManager) -> None:
    assert manager.wait("nobody", 30.0) is None
    found = manager.wait("holder", 30.0)
    assert found is not None
    assert found["state"] == "RUNNING"


def test_an_earlier_wake_up_is_not_told_again(embedded_redis: RedisServer) -> None:
    """Its waiter was gone when it came, and the lease it told of has ended since."""
    with GPUResourceManager.from_url(embedded_redis.fresh_url(), inventory=default_inventory(1)) as manager:
        manager.submit("holder", 8)
        manager.submit("next", 8)
        assert not manager.store.await_decision("next", lambda: False, 0.01)
        manager.release("holder")
        manager.release("next")
        manager.submit("holder", 8)
        manager.submit("next", 8)
        found = manager.wait("next", 0.05)
    assert found is not None
    assert found["state"] == "WAITING"
