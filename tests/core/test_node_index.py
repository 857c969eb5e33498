"""Indexes, snapshots and the journal of the cluster state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Drained,
    Expired,
    Granted,
    InventoryChanged,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Node, Placement, Request
from resource_manager.core.node_index import MIN_JOURNAL_LENGTH
from resource_manager.errors import CapacityError, LeaseNotFoundError, UnknownNodeError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import ORDERS, fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import node, nodes


def hold(
    state: ClusterState,
    task_id: str,
    on: str,
    *gpu_ids: int,
    milli: int = 1000,
    ends: float = 1e9,
    cpus: int = 0,
) -> Lease:
    request = Request(task_id, len(gpu_ids), gpu_milli=milli, resources={"cpus": cpus}, ttl_s=ends)
    lease = Lease(request, (Placement(on, gpu_ids),), state.last_fencing_token + 1, 0.0, ends)
    state.apply(Granted(lease, 0.0))
    return lease


def names(state: ClusterState, request: Request, start: int = 0) -> str:
    return "".join(found.name for found in state.candidates(request, start))


# ---- candidate nodes ----


@pytest.mark.parametrize(
    ("start", "found"),
    [(0, "abde"), (1, "bdea"), (2, "deab"), (3, "deab"), (4, "eabd"), (5, "abde"), (9, "abde")],
)
def test_candidates_come_in_inventory_order_from_any_position(start: int, found: str) -> None:
    state = ClusterState(nodes("abcde"))
    hold(state, "t", "c", 0, 1)
    assert names(state, Request("t", 1), start) == found
    assert "".join(sorted(names(state, Request("t", 0), start))) == "abcde"


def test_only_open_nodes_with_enough_gpus_are_candidates() -> None:
    state = ClusterState((node("a", 0), node("b", 1), node("c", 4), node("d", 2), node("e", 4)))
    hold(state, "x", "c", 1)
    hold(state, "y", "d", 0, milli=1)
    hold(state, "z", "e", 0, 1, 2, 3)
    masks = {
        (0, 1000): "abcde",
        (1, 1000): "bcd",
        (2, 1000): "c",
        (3, 1000): "c",
        (4, 1000): "",
        (5, 1000): "",
        (1, 999): "bcd",
    }
    for drained in ("", "c"):
        if drained:
            state.apply(Drained(drained, 0.0))
        for (gpus, milli), found in masks.items():
            mask = state.candidate_mask(Request("t", gpus, gpu_milli=milli))
            seen = "".join(state.nodes[i].name for i in range(8) if mask >> i & 1)
            assert seen == found.replace(drained, "")


def test_a_required_node_is_the_only_candidate() -> None:
    state = ClusterState(nodes("abc"))
    assert state.candidate_mask(Request("t", 1, required_node="c")) == 0b100
    assert state.candidate_mask(Request("t", 1, required_node="x")) == 0
    assert names(state, Request("t", 1, required_node="c")) == "c"
    assert names(state, Request("t", 1, required_node="x")) == ""


def test_a_node_is_found_by_name_or_server_id() -> None:
    state = ClusterState(nodes("ab"))
    assert state.node("b") is state.by_server_id[1] is state.nodes[1]
    with pytest.raises(UnknownNodeError, match="server 'x' is not in the inventory of 2 servers") as caught:
        state.node("x")
    assert caught.value.node == "x"


def test_largest_is_the_maximum_of_each_resource_over_the_nodes() -> None:
    state = ClusterState((node("a", cpus=4), Node("b", 1, {"cpus": 16, "fpga": 1}), node("c", cpus=8)))
    assert state.largest == {"cpus": 16, "fpga": 1}


def assert_indexed(state: ClusterState) -> None:
    """Assert that the indexes agree with a scan of all nodes."""
    allocator.check(state)
    for i, at in enumerate(state.nodes):
        assert at.index == i
        assert at.whole_free == sum(free == 1000 for free in at.gpu_free.values())
        assert at.free_milli == sum(at.gpu_free.values())
        assert [bool(mask >> i & 1) for mask in state.whole_free_masks] == [
            level == at.whole_free for level in range(len(state.whole_free_masks))
        ]
        assert bool(state.open_mask >> i & 1) == at.is_open
        assert bool(state.any_milli_mask >> i & 1) == (at.free_milli > 0)
        assert state.by_name[at.name] is state.by_server_id[at.node.server_id] is at
    for mask in (*state.whole_free_masks, state.open_mask, state.any_milli_mask):
        assert mask >> len(state.nodes) == 0
    assert {task_id for at in state.nodes for task_id in at.leases} == set(state.leases)


@pytest.mark.parametrize("seed", range(4))
def test_indexes_follow_every_change(seed: int) -> None:
    """Leases of all sizes begin and end on nodes that close, open, shrink, leave and come back."""
    rng = random.Random(seed)
    state = ClusterState(nodes("abcdefghijk", 4))
    for step in range(400):
        kind = rng.randrange(10)
        if kind < 5:
            gpus = rng.randrange(4)
            milli = rng.choice((1000, 300)) if gpus == 1 else 1000
            request = Request(f"t{step}", gpus, gpu_milli=milli, resources={"cpus": rng.randrange(3)})
            changes = allocator.allocate(
                state, request, SchedulingPass(POLICIES["round_robin"], fifo, float(step))
            )
        elif kind < 8 and state.leases:
            changes = lease_steps.release(state, rng.choice(sorted(state.leases)), float(step))
        elif kind == 8:
            at = rng.choice(state.nodes)
            changes = [Drained(at.name, float(step)) if at.is_open else Resumed(at.name, float(step))]
        else:
            kept = rng.sample("abcdefghijk", rng.randrange(8, 12))
            changes = [InventoryChanged(nodes("".join(kept), rng.choice((2, 4))), float(step))]
        with state.trial():
            for change in changes:
                if not isinstance(change, InventoryChanged):
                    state.apply(change)
            assert_indexed(state)
        assert_indexed(state)
        for change in changes:
            state.apply(change)
        assert_indexed(state)
        again = ClusterState.from_snapshot(state.snapshot())
        assert again.snapshot() == state.snapshot()
        assert_indexed(again)


# ---- snapshots and counters ----


def test_a_snapshot_is_the_whole_state() -> None:
    state = ClusterState(nodes("abc"))
    hold(state, "t", "b", 0, milli=400, ends=60.0)
    hold(state, "u", "c", 1)
    changes: list[Change] = [
        Queued(Request("w", 2), 1.0, 1, 1.0),
        Queued(Request("x", 1), 2.0, 2, 2.0),
        Cancelled("w", 3.0),
        Drained("b", 4.0, "fans", failed=True),
        Quarantined("t", 1, 5.0),
        InventoryChanged(nodes("ab"), 6.0),
    ]
    for change in changes:
        state.apply(change)
    snapshot = state.snapshot()
    assert (snapshot.version, snapshot.last_fencing_token, snapshot.sequence, snapshot.last_node) == (
        8,
        2,
        2,
        "c",
    )
    assert [at.name for at in snapshot.nodes] == ["a", "b", "c"]
    assert [lease.lease_id for lease in snapshot.leases] == ["t", "u"]
    assert [(pending.lease_id, pending.sequence) for pending in snapshot.pending] == [("x", 2)]
    assert snapshot.drained == (Drained("b", 4.0, "fans", failed=True),)
    assert snapshot.retired == ("c",)
    again = ClusterState.from_snapshot(snapshot)
    assert again.snapshot() == snapshot
    assert_indexed(again)
    assert not again.node("b").is_open
    assert not again.node("c").is_open
    assert again.expired(1e9) == [state.leases["u"]], "a quarantined lease does not expire again"


def test_version_fencing_token_and_sequence_only_grow() -> None:
    state = ClusterState(nodes("ab"))
    state.apply(Granted(Lease(Request("t"), (Placement("a"),), 5, 0.0), 0.0))
    state.apply(Granted(Lease(Request("u"), (Placement("b"),), 3, 0.0), 0.0))
    assert (state.version, state.last_fencing_token, state.last_node) == (2, 5, "b")
    for sequence, task_id in enumerate(("w", "x"), 1):
        state.apply(Queued(Request(task_id), 7.0, sequence, 7.0))
        assert state.pending[task_id].sequence == state.sequence == sequence
        assert state.pending[task_id].queued_at == 7.0


def test_a_grant_removes_the_request_from_the_queue() -> None:
    state = ClusterState(nodes("a"))
    state.apply(Queued(Request("t", 1), 0.0, 1, 0.0))
    state.apply(Queued(Request("u", 1), 0.0, 2, 0.0))
    hold(state, "t", "a", 0)
    assert set(state.pending) == {"u"}
    hold(state, "v", "a", 1)
    assert set(state.pending) == {"u"}, "a grant without a pending request leaves the queue unchanged"


def test_a_renewal_extends_the_lease_and_ends_its_quarantine() -> None:
    state = ClusterState(nodes("a"))
    hold(state, "t", "a", 0, ends=10.0)
    state.apply(Quarantined("t", 1, 10.0))
    assert state.leases["t"].quarantined
    assert state.expired(10.0) == []
    state.apply(Renewed("t", 1, 11.0, 71.0))
    assert (state.leases["t"].expires_at, state.leases["t"].quarantined) == (71.0, False)
    assert state.node("a").leases["t"] is state.leases["t"]
    assert state.expired(70.9) == []
    assert state.expired(71.0) == [state.leases["t"]]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (Queued(Request("w"), 1.0, 2, 1.0), CapacityError, "task 'w' is already pending or holds a lease"),
        (Queued(Request("t"), 1.0, 3, 1.0), CapacityError, "task 't' is already pending or holds a lease"),
        (Cancelled("x", 1.0), LeaseNotFoundError, "no live lease of task 'x'"),
        (Released("t", 2, 1.0), LeaseNotFoundError, "no live lease of task 't' with fencing token 2"),
        (Expired("x", 1, 1.0), LeaseNotFoundError, "no live lease of task 'x' with fencing token 1"),
        (Resumed("x", 1.0), UnknownNodeError, "server 'x'"),
        (
            Granted(Lease(Request("y"), (Placement("x"),), 2, 0.0), 0.0),
            UnknownNodeError,
            "server 'x' is not in the inventory of 1 server",
        ),
        (
            Granted(Lease(Request("t"), (Placement("a"),), 2, 0.0), 0.0),
            CapacityError,
            "task 't' already holds a lease",
        ),
        (
            Granted(Lease(Request("y", 1), (Placement("a"),), 2, 0.0), 0.0),
            CapacityError,
            r"placement of 'y' names GPUs \(\), but the request has gpus=1",
        ),
        (
            Granted(Lease(Request("y", 1), (Placement("a", (0,)),), 2, 0.0), 0.0),
            CapacityError,
            "GPU 0 of 'a' has less than 1000 milli free",
        ),
        (
            Granted(Lease(Request("y", resources={"cpus": 9}), (Placement("a"),), 2, 0.0), 0.0),
            CapacityError,
            "'a' has less than 9 cpus free",
        ),
    ],
)
def test_a_refused_change_gives_a_reason_and_changes_nothing(
    change: Change, error: type[Exception], text: str
) -> None:
    state = ClusterState(nodes("a"))
    hold(state, "t", "a", 0)
    state.apply(Queued(Request("w"), 0.0, 1, 0.0))
    before = state.snapshot()
    with pytest.raises(error, match=text):
        state.apply(change)
    assert state.snapshot() == before
    assert_indexed(state)


# ---- other inventories and the journal ----


def test_a_retired_node_that_comes_back_takes_leases_again() -> None:
    both = nodes("ab")
    state = ClusterState(both)
    hold(state, "t", "b", 0)
    state.apply(InventoryChanged(both[:1], 1.0))
    assert not state.node("b").is_open
    state.apply(InventoryChanged(both, 2.0))
    assert state.node("b").is_open
    assert_indexed(state)


def test_a_retired_node_leaves_its_number_to_the_node_that_has_it_now() -> None:
    state = ClusterState(nodes("abc"))
    hold(state, "t", "b", 0)
    state.apply(InventoryChanged((node("a"), replace(node("c"), server_id=1)), 1.0))
    assert {at.name: at.node.server_id for at in state.nodes} == {"a": 0, "c": 1, "b": 3}
    assert_indexed(state)
    state.apply(InventoryChanged((node("a"), replace(node("c"), server_id=3)), 2.0))
    assert {at.name: at.node.server_id for at in state.nodes} == {"a": 0, "c": 3, "b": 4}
    state.apply(InventoryChanged((node("a"), node("c")), 3.0))
    assert state.by_name["b"].node.server_id == 4, "it is nobody's: it stays"
    hold(state, "u", "a", 0)
    state.apply(InventoryChanged((replace(node("d"), server_id=0), replace(node("e"), server_id=4)), 4.0))
    assert {at.name: at.node.server_id for at in state.nodes} == {"d": 0, "e": 4, "a": 5, "b": 6}


def test_of_two_nodes_with_one_number_in_a_state_of_before_the_one_that_is_not_retired_has_it() -> None:
    state = ClusterState(nodes("abc"))
    hold(state, "t", "b", 0)
    state.apply(InventoryChanged(nodes("ac"), 1.0))
    before = state.snapshot()
    twice = (node("a"), replace(node("c"), server_id=1), node("b"))
    old = ClusterState.from_snapshot(replace(before, nodes=twice))
    assert old.by_server_id[1] is old.by_name["c"]
    old.apply(InventoryChanged((*twice[:2], node("d")), 2.0))
    assert old.by_name["b"].node.server_id == 4
    assert_indexed(old)


def test_the_journal_returns_the_nodes_changed_since_a_mark() -> None:
    state = ClusterState(nodes("abc"))
    start = mark = state.mark
    for step in range(10):
        hold(state, f"t{step}", "abc"[step % 3])
        assert state.changed_since(mark) == [step % 3]
        mark = state.mark
    state.apply(Drained("b", 0.0))
    assert state.changed_since(mark) == [1]
    state.apply(Resumed("b", 0.0))
    state.apply(Released("t0", 1, 0.0))
    assert state.changed_since(mark) == [1, 1, 0]
    assert state.changed_since(start) == [0, 1, 2] * 3 + [0, 1, 1, 0]
    for step in range(2 * MIN_JOURNAL_LENGTH):
        mark = state.mark
        hold(state, f"u{step}", "a")
        assert (state.mark, state.changed_since(mark)) == (mark + 1, [0]), "a mark stays valid after a cut"
        assert len(state.journal) <= MIN_JOURNAL_LENGTH
    assert state.changed_since(start) is None
    assert state.changed_since(state.mark - 3) == [0, 0, 0]


# ---- amounts ----


def test_a_shrunk_node_may_have_more_allocated_than_its_total() -> None:
    state = ClusterState(nodes("ab", 4))
    hold(state, "t", "a", 2, 3, cpus=6)
    hold(state, "u", "a", 1, milli=400, cpus=1)
    for inventory in ((node("a", 3, 5), node("b", 4)), (node("a", 2, 5), node("b", 4))):
        state.apply(InventoryChanged(inventory, 1.0))
        at = state.node("a")
        assert at.free == {"cpus": -2}
        assert at.gpu_free == {0: 1000, 1: 600, **({2: 0} if len(inventory[0].gpus) == 3 else {})}
        assert (at.whole_free, at.free_milli) == (1, 1600)
        assert_indexed(state)
    state.apply(Released("t", 1, 2.0))
    assert (at.free, at.gpu_free) == ({"cpus": 4}, {0: 1000, 1: 600})
    state.apply(Released("u", 2, 2.0))
    assert (at.free, at.gpu_free) == ({"cpus": 5}, {0: 1000, 1: 1000})
    assert_indexed(state)


def test_a_lease_keeps_a_resource_that_its_node_no_longer_lists() -> None:
    state = ClusterState([Node("a", 0, {"fpga": 2})])
    for token in (1, 2):
        request = Request(f"t{token}", resources={"fpga": 1})
        state.apply(Granted(Lease(request, (Placement("a"),), token, 0.0), 0.0))
    state.apply(InventoryChanged((Node("a", 0, {"cpus": 8}),), 1.0))
    assert state.node("a").free == {"cpus": 8, "fpga": -2}
    state.apply(Released("t1", 1, 2.0))
    assert state.node("a").free == {"cpus": 8, "fpga": -1}
    state.apply(Released("t2", 2, 2.0))
    assert state.node("a").free == {"cpus": 8}


def test_not_even_one_milli_of_a_missing_gpu_can_be_allocated() -> None:
    state = ClusterState(nodes("a"))
    with pytest.raises(CapacityError, match="GPU 2 of 'a' has less than 1 milli free"):
        hold(state, "t", "a", 2, milli=1)


def test_a_state_without_nodes_is_valid() -> None:
    state = ClusterState()
    assert list(state.candidates(Request("t"))) == []
    assert (state.snapshot().nodes, state.snapshot().last_node) == ((), None)
    assert_indexed(state)


def test_a_node_with_one_free_milli_is_a_candidate() -> None:
    state = ClusterState(nodes("a", 1))
    hold(state, "t", "a", 0, milli=999)
    for same in (state, ClusterState.from_snapshot(state.snapshot())):
        assert names(same, Request("u", 1, gpu_milli=1)) == "a"
        assert names(same, Request("u", 1, gpu_milli=2)) == ""


def test_a_resized_node_stays_closed() -> None:
    state = ClusterState((node("a"), node("b")))
    state.apply(Drained("a", 0.0, "fans"))
    state.apply(InventoryChanged((node("a", cpus=16), node("b")), 1.0))
    assert state.node("a").free == {"cpus": 16}
    assert state.node("a").drained == Drained("a", 0.0, "fans")
    assert names(state, Request("t")) == "b"
    assert_indexed(state)


def test_nodes_keep_the_order_of_the_inventory() -> None:
    state = ClusterState(nodes("cab"))
    request = Request("t", 1)
    assert [found.name for found in state.candidates(request)] == ["c", "a", "b"]
    state.apply(Queued(request, 0.0, 1, 0.0))
    (granted,) = allocator.schedule_pending(state, SchedulingPass(POLICIES["first_fit"], ORDERS["fifo"], 1.0))
    assert isinstance(granted, Granted)
    assert granted.lease.placement == Placement("c", (0,))
