"""Reasons of refusals: found beside the decisions, which a long queue would hold up otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resource_manager import MemoryStore
from resource_manager.errors import LeaseNotFoundError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.rest.state_follower import StateFollower
from resource_manager.settings import Settings
from tests.builders import queue_entry


@pytest.fixture
def manager() -> GPUResourceManager:
    store = MemoryStore()
    manager = GPUResourceManager(Settings(store="memory://"), store=store, inventory=default_inventory(1))
    manager.submit("holder", 8)
    return manager


@pytest.fixture
def asked(manager: GPUResourceManager) -> Iterator[list[bool]]:
    """For each look for readers, whether another thread could decide meanwhile."""
    follower, free = StateFollower(manager.store), []

    def look(reader: Callable[..., Any]) -> Any:
        mutex = manager._commits._groups.mutex
        free.append(not mutex.locked())
        return follower.read(reader)

    manager.read_from(look)
    yield free
    follower.close()


def test_a_pending_request_is_answered_beside_the_decisions(
    manager: GPUResourceManager, asked: list[bool]
) -> None:
    found = queue_entry(manager.submit("next", 8))
    assert (found["state"], found["position"], asked) == ("WAITING", 1, [True])


def test_a_batch_is_explained_in_one_look(manager: GPUResourceManager, asked: list[bool]) -> None:
    answers = manager.try_allocate_batch([{"lease_id": f"t{number}", "gpus": 1} for number in range(40)])
    assert all(isinstance(answer, Refusal) for answer in answers)
    assert asked == [True]


def test_a_request_that_could_start_by_now_says_so(manager: GPUResourceManager) -> None:
    def look(reader: Callable[..., Any]) -> Any:
        manager.release("holder")
        manager.read_from(follower.read)
        manager.allocate("next", 8)
        return follower.read(reader)

    follower = StateFollower(manager.store)
    manager.read_from(look)
    refused = manager.allocate("next", 8)
    follower.close()
    assert isinstance(refused, Refusal)
    assert refused.kind == "behind_queue"


def test_a_request_that_was_cancelled_meanwhile_is_not_found(manager: GPUResourceManager) -> None:
    def look(reader: Callable[..., Any]) -> Any:
        manager.cancel("next")
        return follower.read(reader)

    follower = StateFollower(manager.store)
    manager.read_from(look)
    with pytest.raises(LeaseNotFoundError, match="cancelled since"):
        manager.submit("next", 8)
    follower.close()
