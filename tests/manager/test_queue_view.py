"""What many ask of a queue: the entries of single requests, computed together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.reasons.feasibility import standings
from resource_manager.settings import Settings
from tests.builders import Clock


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    settings, store = Settings(store="memory://"), MemoryStore(clock=Clock())
    with GPUResourceManager(settings, store=store, inventory=default_inventory(2)) as manager:
        for number in range(2):
            manager.allocate(f"runs-{number}", 8)
        for number in range(20):
            manager.submit(f"waits-{number}", 1 + number % 8)
        yield manager


def without_wait(entry: Any) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("waited_s", "estimated_start")}


def test_the_entry_of_a_request_is_that_of_the_queue_after_each_change(manager: GPUResourceManager) -> None:
    for change in (
        lambda: manager.cancel("waits-3"),
        lambda: manager.release("runs-0"),
        lambda: manager.submit("late", 1),
    ):
        change()
        queue = manager.queue()
        assert len(queue) > 10
        for _ in range(2):
            found = [manager.status_of(entry["task_id"]) for entry in queue]
            assert [without_wait(each) for each in found] == [without_wait(each) for each in queue]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Walks over the whole queue."""
    walks: list[Any] = []

    def counted(*args: Any) -> Any:
        walks.append(args)
        return standings(*args)

    monkeypatch.setattr("resource_manager.manager.queue_view.standings", counted)
    return walks


def test_many_who_ask_for_their_entries_share_one_walk(manager: GPUResourceManager, walks: list[Any]) -> None:
    ids = [entry["task_id"] for entry in manager.queue()]
    assert all(manager.status_of(lease_id) for lease_id in ids * 5)
    assert len(walks) == 1
    manager.cancel(ids[0])
    assert manager.status_of(ids[1]) is not None
    assert len(walks) == 1, "who asks alone is answered alone"


def test_a_dear_entry_is_not_told_of_another_request(
    manager: GPUResourceManager, walks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))  # each computation takes a second
    for number in range(5):
        for _ in range(3):
            assert manager.status_of("waits-7") is not None
        manager.submit(f"other-{number}", 1)
    assert len(walks) == 2, "the third state has the entries of the second"
    manager.cancel("waits-7")
    assert manager.status_of("waits-7") is None
    manager.submit("waits-7", 2)
    found: Any = manager.status_of("waits-7")
    assert (found["required_gpus"], found["position"]) == (2, 25)
