"""What is explained of a request is what a request of that shape gets at the same time."""

from __future__ import annotations

import pytest

from resource_manager import GPUResourceManager, Refusal
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.settings import Settings
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock


def opened(clock: Clock, servers: int, **cluster: str) -> GPUResourceManager:
    store, nodes = MemoryStore(clock=clock), default_inventory(servers)
    return GPUResourceManager(Settings(store="memory://"), store=store, inventory=nodes, cluster=cluster)


@pytest.mark.parametrize("order", ["fifo", "priority+backfill"])
def test_a_lease_whose_life_is_over_is_not_in_the_way(clock: Clock, order: str) -> None:
    """The next request ends it, and until then nobody may ask."""
    manager = opened(clock, 1, order=order)
    manager.allocate("of a dead worker", 8, ttl=60)
    assert not manager.explain(gpus=2)["would_be_granted"]
    clock.now += 61
    answer = manager.explain(gpus=2)
    assert (answer["would_be_granted"], answer["fits"], answer["gpu_ids"]) == (True, True, [0, 1])
    assert answer["servers"][0]["fits"]
    assert [lease["task_id"] for lease in manager.leases()] == ["of a dead worker"], (
        "a question changes nothing"
    )
    granted = manager.try_allocate("next", 2)
    assert not isinstance(granted, Refusal)
    assert granted["gpu_ids"] == answer["gpu_ids"]


def test_what_the_end_of_such_a_lease_frees_is_theirs_who_wait(clock: Clock) -> None:
    manager = opened(clock, 1, order="fifo")
    manager.allocate("of a dead worker", 8, ttl=60)
    manager.submit("ahead", 6)
    clock.now += 61
    answers = [manager.explain(gpus=gpus) for gpus in (2, 4)]
    assert [answer["would_be_granted"] for answer in answers] == [True, False]
    refused = manager.try_allocate("next", 4)
    assert isinstance(refused, Refusal)
    assert (answers[1]["kind"], answers[1]["reason"]) == (refused.kind, refused.detail)


def test_a_request_behind_another_is_placed_where_it_does_not_delay_that(clock: Clock) -> None:
    manager = opened(clock, 2, policy="best_fit", order="fifo+backfill")
    manager.allocate("short", 4, expected_runtime=60, server=0)
    manager.submit("ahead", 8, server=0)
    answer = manager.explain(gpus=4, expected_runtime=7200)
    assert (answer["would_be_granted"], answer["server_name"]) == (True, "gpu-server-1"), "not the tightest"
    granted = manager.try_allocate("behind", 4, expected_runtime=7200)
    assert not isinstance(granted, Refusal)
    assert (granted["server_name"], granted["members"]) == (answer["server_name"], answer["members"])
