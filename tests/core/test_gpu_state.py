"""Closed GPUs and GPUs that are being cleaned: never free, never in the way of a lease that exists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Change,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    Released,
    Resumed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import condition_of, recount, withheld, withheld_milli
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Placement, Request, Spread
from resource_manager.core.node_state import Cleaning
from resource_manager.errors import CorruptStateError
from resource_manager.manager.server_words import withheld_words
from resource_manager.scheduling import allocator
from tests.builders import nodes

NODES = nodes("ab", gpus=3)


def granted(task: str, token: int, *gpu_ids: int, node: str = "a", milli: int = 1000) -> Granted:
    request = Request(task, len(gpu_ids), gpu_milli=milli, resources={"cpus": 1})
    return Granted(Lease(request, (Placement(node, gpu_ids),), token, 0.0), 0.0)


def state_of(*changes: Change) -> ClusterState:
    cluster = ClusterState(NODES)
    for change in changes:
        cluster.apply(change)
        allocator.check(cluster)
    return cluster


def closed(gpu_id: int, *, stop: bool = False) -> GpuClosed:
    return GpuClosed("a", gpu_id, "", "xid 79; fell off the bus", 1.0, stop)


def free(cluster: ClusterState, node: str = "a") -> list[int]:
    state = cluster.node(node)
    assert state.free_milli == sum(state.gpu_free.values())
    assert state.whole_free == sum(milli == MILLI_PER_GPU for milli in state.gpu_free.values())
    return list(state.gpu_free.values())


def test_a_closed_gpu_is_not_free_and_its_lease_goes_on() -> None:
    cluster = state_of(granted("t", 1, 0, milli=400), closed(0), closed(1))
    assert free(cluster) == [0, 0, 1000]
    assert list(cluster.leases) == ["t"]
    cluster.apply(Released("t", 1, 2.0))
    assert free(cluster) == [0, 0, 1000], "the end of its lease does not open it"
    cluster.apply(GpuOpened("a", 0, 3.0))
    assert free(cluster) == [1000, 0, 1000]
    assert condition_of(cluster.node("a").closed_gpus[1]) == "xid 79"
    assert cluster.node("a").opened_gpus == {0: GpuOpened("a", 0, 3.0)}


def test_only_a_closure_that_stops_marks_the_lease() -> None:
    cluster = state_of(granted("t", 1, 0, 1), closed(0))
    assert cluster.gpu_failure(cluster.leases["t"]) is None
    cluster.apply(closed(1, stop=True))
    assert cluster.gpu_failure(cluster.leases["t"]) == closed(1, stop=True)
    cluster.apply(GpuOpened("a", 1, 2.0))
    assert cluster.gpu_failure(cluster.leases["t"]) is None


def test_on_a_watched_node_exactly_what_the_lease_held_is_cleaned_first() -> None:
    cluster = state_of(
        AgentSeen("a", 0.0),
        granted("t", 1, 0, milli=400),
        granted("u", 2, 0, milli=250),
        granted("v", 3, 1, 2),
        Released("t", 1, 5.0),
        Expired("v", 3, 6.0),
    )
    assert free(cluster) == [350, 0, 0]
    assert cluster.node("a").free["cpus"] == 7, "only GPUs are cleaned"
    assert withheld_milli(cluster.node("a")) == {0: 400, 1: 1000, 2: 1000}
    for cleaned in (GpuCleaned("a", 0, 1, 7.0), GpuCleaned("a", 2, 3, 7.0), GpuCleaned("a", 1, 99, 7.0)):
        cluster.apply(cleaned)
    assert free(cluster) == [750, 0, 1000], "the token names the lease"
    cluster.apply(AgentLost("a", 68.0, 8.0))
    assert free(cluster) == [750, 0, 1000], "nobody can say that the other is clean"
    cluster.apply(Released("u", 2, 69.0))
    assert free(cluster) == [750, 0, 1000], "nor what is left now"
    cluster.apply(Resumed("a", 70.0))
    assert free(cluster) == [750, 0, 1000]
    cluster.apply(granted("w", 4, 0, milli=250))
    cluster.apply(Released("w", 4, 71.0))
    assert free(cluster) == [750, 0, 1000], "no longer watched"
    allocator.check(cluster)


def test_a_node_whose_agent_is_silent_is_closed_until_it_reports_or_is_resumed() -> None:
    cluster = state_of(AgentSeen("a", 0.0), granted("t", 1, 0), AgentLost("a", 61.0, 1.0))
    state, request = cluster.node("a"), Request("u", 1)
    assert (state.is_open, state.watched, state.fits(request)) == (False, True, False)
    assert [node.name for node in cluster.candidates(request)] == ["b"]
    assert list(cluster.leases) == ["t"]
    for change, is_watched in ((AgentSeen("a", 62.0), True), (Resumed("a", 62.0), False)):
        with cluster.trial():
            cluster.apply(change)
            assert (state.is_open, state.watched, state.silent) == (True, is_watched, None)
            assert [node.name for node in cluster.candidates(request)] == ["a", "b"]
        assert state.silent == AgentLost("a", 61.0, 1.0)
    cluster.apply(Drained("a", 63.0))
    cluster.apply(AgentSeen("a", 64.0))
    assert (state.is_open, state.silent) == (False, None), "it is drained all the same"
    cluster.apply(Resumed("a", 65.0))
    assert (state.is_open, state.watched) == (True, True)


def test_silence_outlives_another_inventory_copies_and_snapshots() -> None:
    cluster = state_of(AgentSeen("a", 0.0), AgentLost("a", 61.0, 1.0))
    assert cluster.node("a").copy().silent == AgentLost("a", 61.0, 1.0)
    assert not cluster.part([0]).node("a").is_open
    cluster.apply(InventoryChanged(nodes("abc", gpus=2), 62.0))
    assert not cluster.node("a").is_open
    again = ClusterState.from_snapshot(cluster.snapshot())
    assert (again.node("a").silent, again.open_mask) == (AgentLost("a", 61.0, 1.0), 0b110)
    with pytest.raises(CorruptStateError, match="'z'"):
        ClusterState.from_snapshot(replace(cluster.snapshot(), silent=(AgentLost("z", 2.0, 1.0),)))


def test_on_other_nodes_the_end_of_a_lease_frees_at_once() -> None:
    cluster = state_of(AgentSeen("b", 0.0), granted("t", 1, 0), Released("t", 1, 1.0))
    assert free(cluster) == [1000, 1000, 1000]
    assert cluster.snapshot().cleaning == ()


def test_a_gpu_that_stays_in_the_inventory_keeps_its_state() -> None:
    def server(*uuids: str, cpus: int = 8) -> Node:
        gpus = tuple(Gpu(number, uuid=uuid) for number, uuid in enumerate(uuids))
        return Node("a", 0, {"cpus": cpus}, gpus)

    cluster = ClusterState([server("x", "y", "z")])
    lease = Lease(Request("t", 1), (Placement("a", (2,), ("z",)),), 1, 0.0)
    for change in (AgentSeen("a", 0.0), closed(0), closed(1), Granted(lease, 0.0), Released("t", 1, 1.0)):
        cluster.apply(change)
    cluster.apply(InventoryChanged((server("x", "y", "z", cpus=9),), 2.0))
    assert free(cluster) == [0, 0, 0], "resized only"
    cluster.apply(InventoryChanged((server("x", "w", "z"),), 3.0))
    assert free(cluster) == [0, 1000, 0], "GPU 1 is another device"
    cluster.apply(InventoryChanged((server("x", "z", "w"),), 4.0))
    assert free(cluster) == [0, 0, 1000], "the device that is being cleaned is GPU 1 now"
    cluster.apply(GpuCleaned("a", 2, 1, 5.0))
    assert free(cluster) == [0, 1000, 1000]
    assert cluster.node("a").watched
    allocator.check(cluster)


def said(cluster: ClusterState, gpu_ids: Collection[int]) -> list[str]:
    found = withheld(cluster.node("a"), gpu_ids)
    assert found is not None
    return withheld_words(found.gpus)


def test_what_is_withheld_is_said_in_one_line_for_a_gpu() -> None:
    cluster = state_of(AgentSeen("a", 0.0), granted("t", 1, 1), Released("t", 1, 1.0), closed(0))
    assert said(cluster, {0, 1, 2}) == [
        "GPU 0 is closed: xid 79; fell off the bus",
        "GPU 1 is being cleaned after its last lease",
    ]


def test_a_gang_that_shares_a_gpu_has_all_of_it_cleaned_as_one_entry() -> None:
    request = Request("t", 1, gpu_milli=400, nodes=2, spread=Spread.PACK)
    members = (Placement("a", (1,), port=1), Placement("a", (1,), port=2))
    cluster = state_of(AgentSeen("a", 0.0))
    cluster.apply(Granted(Lease(request, members, 7, 0.0), 0.0))
    cluster.apply(Released("t", 7, 5.0))
    assert cluster.node("a").cleaning == {(1, 7): Cleaning("a", 1, "", 7, 800, "t", 5.0, {}, 0)}
    assert free(cluster) == [1000, 200, 1000]


def test_a_gpu_that_is_opened_and_closed_again_is_no_longer_said_to_have_been_opened() -> None:
    cluster = state_of(closed(0), GpuOpened("a", 0, 3.0), GpuOpened("a", 1, 3.0), closed(0))
    assert cluster.node("a").opened_gpus == {1: GpuOpened("a", 1, 3.0)}


def test_what_is_withheld_counts_closed_gpus_without_any_cleaning_and_none_that_has_left() -> None:
    cluster = state_of(granted("t", 1, 0, milli=400), closed(0))
    assert withheld_milli(cluster.node("a")) == {0: 600}
    assert withheld_milli(cluster.node("b")) == {}
    before, after = ((Node("a", 0, {"cpus": 8}, (Gpu(0, uuid=uuid),)),) for uuid in ("x", "y"))
    cluster = ClusterState(before)
    lease = Lease(Request("t", 1), (Placement("a", (0,), ("x",)),), 1, 0.0)
    for change in (AgentSeen("a", 0.0), Granted(lease, 0.0), Released("t", 1, 1.0)):
        cluster.apply(change)
    assert withheld_milli(cluster.node("a")) == {0: 1000}
    cluster.apply(InventoryChanged(after, 3.0))
    assert withheld_milli(cluster.node("a")) == {}


def test_what_was_opened_is_known_after_a_change_of_the_inventory_if_the_gpu_stays() -> None:
    cluster = state_of(GpuOpened("a", 0, 3.0), GpuOpened("a", 2, 3.0))
    cluster.apply(InventoryChanged(nodes("ab", gpus=2), 4.0))
    assert cluster.node("a").opened_gpus == {0: GpuOpened("a", 0, 3.0)}


def test_a_gpu_that_is_not_there_is_left_out_of_a_count_and_the_others_are_counted() -> None:
    state = state_of().node("a")
    state.closed_gpus[0] = closed(0)
    recount(state, (9, 0))
    assert state.gpu_free == {0: 0, 1: 1000, 2: 1000}


def test_only_three_withheld_gpus_are_named() -> None:
    cluster = ClusterState(nodes("a", gpus=5))
    for number in range(3):
        cluster.apply(closed(number))
    lines = [f"GPU {number} is closed: xid 79; fell off the bus" for number in range(3)]
    assert said(cluster, range(5)) == lines
    cluster.apply(closed(3))
    cluster.apply(closed(4))
    assert said(cluster, range(5)) == [*lines, "2 more"]


def test_the_name_of_a_condition_ends_before_its_details() -> None:
    assert condition_of(GpuClosed("a", 0, "", "xid 79; bus; lost", 1.0)) == "xid 79"


NAMES = st.sampled_from("ab")
IDS = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.builds(lambda node: ("watch", node), NAMES),
        st.builds(lambda node: ("lose", node), NAMES),
        st.builds(lambda node: ("resume", node), NAMES),
        st.builds(lambda node, gpu, stop: ("close", node, gpu, stop), NAMES, IDS, st.booleans()),
        st.builds(lambda node, gpu: ("open", node, gpu), NAMES, IDS),
        st.builds(lambda gpus, milli: ("grant", gpus, milli), IDS, st.sampled_from((250, 1000))),
        st.builds(lambda place: ("end", place), st.integers(0, 9)),
        st.builds(lambda place: ("clean", place), st.integers(0, 9)),
    ),
    max_size=30,
)


def changes_of(cluster: ClusterState, step: tuple[object, ...], number: int) -> list[Change]:
    """Return the changes of a step that are possible in this state."""
    at = float(number)
    match step:
        case ("watch", str(node)):
            return [AgentSeen(node, at)]
        case ("lose", str(node)):
            return [AgentLost(node, at, at - 60.0)]
        case ("resume", str(node)):
            return [Resumed(node, at)]
        case ("close", str(node), int(gpu_id), bool(stop)):
            return [GpuClosed(node, gpu_id, "", "xid 48", at, stop)]
        case ("open", str(node), int(gpu_id)):
            return allocator.resume_gpu(cluster, node, gpu_id, at)
        case ("grant", int(gpus), int(milli)):
            request = Request(f"t{number}", 1 if milli < 1000 else gpus + 1, gpu_milli=milli)
            found = list(cluster.candidates(request))[:1]
            placements = [Placement(state.name, state.pick_gpus(request)) for state in found]
            return [Granted(Lease(request, (placed,), number + 1, at), at) for placed in placements]
        case ("end", int(place)) if place < len(cluster.leases):
            lease = list(cluster.leases.values())[place]
            return [Released(lease.lease_id, lease.fencing_token, at)]
        case ("clean", int(place)):
            dirty = [entry for state in cluster.nodes for entry in state.cleaning.values()]
            return [GpuCleaned(e.node, e.gpu_id, e.fencing_token, at) for e in dirty[place : place + 1]]
    return []


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_fold_agrees_with_its_definition_its_snapshots_and_its_trials(
    steps: list[tuple[object, ...]],
) -> None:
    cluster = ClusterState(NODES)
    for number, step in enumerate(steps):
        changes = changes_of(cluster, step, number)
        before = cluster.snapshot()
        with cluster.trial():
            for change in changes:
                cluster.apply(change)
        assert_same(cluster, ClusterState.from_snapshot(before))
        assert by_key(cluster) == by_key(ClusterState.from_snapshot(before))
        for change in changes:
            if isinstance(change, Granted):
                node = cluster.node(change.lease.placement.node)
                assert node.silent is None
                assert not set(change.lease.placement.gpu_ids) & node.closed_gpus.keys()
            cluster.apply(change)
        allocator.check(cluster)
        assert_same(cluster, ClusterState.from_snapshot(cluster.snapshot()))


def by_key(cluster: ClusterState) -> tuple[object, ...]:
    now = cluster.snapshot()
    return now.watched, now.silent, now.closed_gpus, now.opened_gpus, now.cleaning, sorted(cluster.leases)


def assert_same(one: ClusterState, other: ClusterState) -> None:
    assert one.open_mask == other.open_mask
    assert [free(one, name) for name in "ab"] == [free(other, name) for name in "ab"]
    assert one.whole_free_masks == other.whole_free_masks
    assert (one.any_milli_mask, one.open_mask) == (other.any_milli_mask, other.open_mask)
