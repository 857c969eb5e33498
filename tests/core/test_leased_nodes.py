"""Trials of changes of the leases, and the order in which leases end."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import (
    AgentSeen,
    Drained,
    Granted,
    InventoryChanged,
    MembersReleased,
    Preempting,
    Released,
    Resumed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.errors import CapacityError, UnknownNodeError
from tests.builders import nodes
from tests.core.test_node_index import assert_indexed, hold


def test_a_nested_trial_is_undone_separately() -> None:
    state = ClusterState(nodes("ab"))
    state.apply(Drained("b", 0.0, "fans"))
    before = state.snapshot()
    with state.trial():
        state.apply(Resumed("b", 1.0))
        hold(state, "t", "b", 0)
        middle = state.snapshot()
        with state.trial():
            state.apply(Released("t", 1, 2.0))
            state.apply(Drained("a", 2.0))
        assert state.snapshot() == middle
        assert_indexed(state)
        state.apply(Released("t", 1, 3.0))
    assert state.snapshot() == before
    assert_indexed(state)
    hold(state, "u", "a", 0)
    assert set(state.leases) == {"u"}


def test_a_trial_that_fails_is_undone() -> None:
    state = ClusterState(nodes("a"))
    hold(state, "t", "a", 0)
    before = state.snapshot()

    def try_too_much() -> None:
        with state.trial():
            state.apply(Released("t", 1, 1.0))
            hold(state, "u", "a", 0, 1)
            hold(state, "v", "a", 0)

    with pytest.raises(CapacityError):
        try_too_much()
    assert state.snapshot() == before
    assert_indexed(state)


def test_an_inventory_change_cannot_be_tried() -> None:
    state = ClusterState(nodes("a"))
    text = r"^an inventory change cannot be tried: apply it outside of a trial$"
    with pytest.raises(CapacityError, match=text), state.trial():
        state.apply(InventoryChanged(nodes("ab"), 1.0))
    assert len(state.nodes) == 1


def test_a_retired_node_leaves_with_its_last_lease_and_comes_back_after_a_trial() -> None:
    """In a trial too: else a change of the node could be committed after the end of that lease."""
    state = ClusterState(nodes("ab"))
    hold(state, "t", "a", 0)
    hold(state, "u", "a", 1)
    state.apply(InventoryChanged(nodes("b"), 1.0))
    with state.trial():
        state.apply(Released("t", 1, 2.0))
        assert [at.name for at in state.nodes] == ["b", "a"]
        state.apply(Released("u", 2, 2.0))
        assert [at.name for at in state.nodes] == ["b"]
        with pytest.raises(UnknownNodeError):
            state.apply(AgentSeen("a", 2.0))
    assert_indexed(state)
    assert set(state.node("a").leases) == {"t", "u"}
    state.apply(Released("t", 1, 2.0))
    assert [at.name for at in state.nodes] == ["b", "a"]
    state.apply(Released("u", 2, 2.0))
    assert [at.name for at in state.nodes] == ["b"]
    assert_indexed(state)


def test_expired_leases_come_in_the_order_of_their_ends() -> None:
    state = ClusterState(nodes("ab"))
    for task_id, ends in (("late", 30.0), ("early", 10.0), ("middle", 20.0)):
        hold(state, task_id, "a", ends=ends)
    assert [lease.lease_id for lease in state.expired(9.9)] == []
    assert [lease.lease_id for lease in state.expired(20.0)] == ["early", "middle"]
    state.apply(Released("early", 2, 20.0))
    assert [lease.lease_id for lease in state.expired(30.0)] == ["middle", "late"]
    # A new lease of the same task has an end of its own.
    hold(state, "early", "b", ends=40.0)
    assert [lease.lease_id for lease in state.expired(30.0)] == ["middle", "late"]
    assert [lease.lease_id for lease in state.expired(40.0)] == ["middle", "late", "early"]


def test_a_trial_leaves_the_expiry_heap_unchanged() -> None:
    state = ClusterState(nodes("ab"))
    hold(state, "t", "a", ends=10.0)
    hold(state, "untouched", "a", ends=15.0)
    with state.trial():
        hold(state, "u", "b", ends=5.0)
        assert [lease.lease_id for lease in state.expired(20.0)] == ["u"]
        state.apply(Released("t", 1, 1.0))
    assert [lease.lease_id for lease in state.expired(20.0)] == ["t", "untouched"]


def test_a_state_that_is_read_again_knows_of_a_preemption_beside_a_remainder_of_the_same_id() -> None:
    state = ClusterState(nodes("abc"))
    members = (Placement("a", (0,)), Placement("b", (0,)))
    state.apply(Granted(Lease(Request("t", 1, nodes=2), members, 1, 0.0), 0.0))
    state.apply(MembersReleased("t", 1, (0,), 1.0))
    hold(state, "t", "c", 0)
    state.apply(Preempting("t", 2, "u", 9.0, 2.0))
    assert ClusterState.from_snapshot(state.snapshot()).preempting == state.preempting == {"t"}
