"""The layout in Redis, read back without a server: whole states and corrupt parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Cancelled,
    Change,
    DeadlineRisk,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    MaintenanceChanged,
    MembersReleased,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
    TeamsChanged,
    Withdrawn,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.node_state import Cleaning
from resource_manager.core.pending import PendingRequest
from resource_manager.core.teams import Teams
from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import change_from_json, change_to_json
from resource_manager.storage.redis.layout import (
    Inventory,
    inventory_from_json,
    inventory_to_json,
    operations,
    parts_of,
    read_state,
)
from tests.builders import nodes

NODES = nodes("abc")
INVENTORY = Inventory(b"7", NODES, ())


def lease(task_id: str, token: int, node: str = "a", **more: Any) -> Lease:
    return Lease(Request(task_id), (Placement(node),), token, 1.0, 61.0, **more)


def steps(change: Change) -> list[list[str]]:
    """Return the operations of a change, each with its field and its text."""
    parts = operations(change)
    return [parts[place : place + 3] for place in range(0, len(parts), 3)]


def field(change: Change) -> bytes:
    return change_to_json(change).encode()


def read(inventory: Inventory = INVENTORY, version: int = 9, **parts: dict[str, bytes]) -> Snapshot:
    hashes = (
        "leases",
        "renewals",
        "quarantined",
        "pending",
        "drained",
        "rules",
        "gpus",
        "meta",
        "preempting",
    )
    flat = [[x for k, v in parts.get(name, {}).items() for x in (k.encode(), v)] for name in hashes]
    return read_state(version, [b"12", b"5", b"b", *flat], inventory).snapshot()


@pytest.mark.parametrize(
    ("change", "name", "field"),
    [
        (Granted(lease("t", 1), 1.0), "grant", "t"),
        (Released("t", 1, 1.0), "end", "t"),
        (Expired("t", 1, 1.0), "end", "t"),
        (MembersReleased("t", 1, (0,), 1.0), "members", "t\x1f1"),
        (Preempting("t", 1, "u", 2.0, 1.0), "preempt", "t"),
        (Renewed("t", 1, 1.0), "renew", "t"),
        (Quarantined("t", 1, 1.0), "quarantine", "t"),
        (Queued(Request("t"), 1.0, 1, 1.0), "queue", "t"),
        (Cancelled("t", 1.0), "cancel", "t"),
        (DeadlineRisk("t", 1.0, 9.0), "rule", "risk:t"),
        (DeadlineRisk("t", 1.0), "unrule", "risk:t"),
        (Announced(Request("d/r/t"), 1.0), "rule", "announced:d/r/t"),
        (Withdrawn("d/r/t", 1.0), "unrule", "announced:d/r/t"),
        (Drained("a", 1.0), "drain", "a"),
        (Resumed("a", 1.0), "resume", "a"),
        (TeamsChanged(Teams(), 1.0), "rule", "teams"),
        (MaintenanceChanged((), 1.0), "rule", "maintenance"),
        (AgentSeen("a b", 1.0), "set gpu", "watched a b"),
        (AgentLost("a", 61.0, 1.0), "set gpu", "watched a"),
        (GpuClosed("a", 3, "GPU-1", "xid 79", 1.0), "set gpu", "gpu 3 a"),
        (GpuOpened("a", 3, 1.0), "set gpu", "gpu 3 a"),
        (GpuCleaned("a", 3, 17, 1.0), "unset gpu", "cleaning 3 17 a"),
        (InventoryChanged(NODES, 1.0), "inventory", ""),
    ],
)
def test_each_change_has_an_operation_and_a_field(change: Change, name: str, field: str) -> None:
    assert [name, field, change_to_json(change)] in steps(change)


def test_a_state_is_read_from_its_parts() -> None:
    state = read(
        leases={
            "late": field(Granted(lease("late", 4), 1.0)),
            "early": field(Granted(lease("early", 3), 1.0)),
        },
        pending={
            "x y": field(Queued(Request("x y"), 3.0, 5, 3.0)),
            "w": field(Queued(Request("w"), 2.0, 2, 2.0)),
        },
        drained={"c": field(Drained("c", 4.0, "two fans"))},
    )
    assert (state.version, state.last_fencing_token, state.sequence, state.last_node) == (9, 12, 5, "b")
    assert state.nodes == NODES
    assert state.leases == (lease("early", 3), lease("late", 4))
    assert state.pending == (PendingRequest(Request("w"), 2.0, 2), PendingRequest(Request("x y"), 3.0, 5))
    assert state.drained == (Drained("c", 4.0, "two fans"),)
    assert state.retired == ()


def test_renewal_and_quarantine_are_stored_apart_from_the_lease() -> None:
    leases = {"t": field(Granted(lease("t", 1, quarantined=True), 1.0))}
    renewed = {"t": field(Renewed("t", 1, 30.0, 90.0))}
    quarantined = {"t": field(Quarantined("t", 1, 61.0)), "other": b"{}"}
    assert read(leases=leases).leases == (lease("t", 1, quarantined=True),)
    assert read(leases=leases, renewals=renewed).leases == (replace(lease("t", 1), expires_at=90.0),)
    assert read(leases=leases, renewals=renewed, quarantined=quarantined).leases == (
        replace(lease("t", 1), expires_at=90.0, quarantined=True),
    )


def test_a_preemption_is_stored_apart_and_quarantines_what_is_renewed_after_its_end() -> None:
    leases = {"t": field(Granted(lease("t", 1), 1.0))}
    taken = {"t": field(Preempting("t", 1, "u", 50.0, 20.0))}
    early = {"t": field(Renewed("t", 1, 30.0, 90.0, 25.0))}
    late = {"t": field(Renewed("t", 1, 51.0, 111.0))}
    marked = replace(lease("t", 1), preempted_by="u", preempt_until=50.0)
    assert read(leases=leases, preempting=taken).leases == (marked,)
    assert read(leases=leases, preempting=taken, renewals=early).leases == (
        replace(marked, expires_at=90.0, checkpoint_at=25.0),
    )
    assert read(leases=leases, preempting=taken, renewals=late).leases == (
        replace(marked, expires_at=111.0, quarantined=True),
    )
    taken_back = {"t": field(Preempting("t", 1, "", 50.0, 40.0))}
    assert read(leases=leases, preempting=taken_back, renewals=late).leases == (
        replace(marked, preempted_by="", expires_at=111.0),
    )


def test_a_preemption_that_came_with_a_restored_lease_quarantines_what_is_renewed_after_its_end() -> None:
    preempted = lease("t", 1, preempted_by="u", preempt_until=50.0)
    leases = {"t": field(Granted(preempted, 1.0))}
    early, late = ({"t": field(Renewed("t", 1, at, 111.0))} for at in (49.0, 51.0))
    renewed = replace(preempted, expires_at=111.0)
    assert read(leases=leases, renewals=early).leases == (renewed,)
    assert read(leases=leases, renewals=late).leases == (replace(renewed, quarantined=True),)
    taken_back = {"t": field(Preempting("t", 1, "", 50.0, 40.0))}
    assert read(leases=leases, renewals=late, preempting=taken_back).leases == (
        replace(renewed, preempted_by=""),
    )


def test_a_retired_node_stays_while_it_is_in_use_and_the_drain_of_an_absent_one_is_kept() -> None:
    inventory = Inventory(b"7", NODES, ("b", "c"))
    drained = {"c": field(Drained("c", 1.0))}
    state = read(inventory, leases={"t": field(Granted(lease("t", 1, "b"), 1.0))}, drained=drained)
    assert [node.name for node in state.nodes] == ["a", "b"]
    assert state.retired == ("b",)
    assert state.drained == (Drained("c", 1.0),)


def test_an_inventory_is_read_back_without_the_leases() -> None:
    cluster = ClusterState(NODES)
    cluster.apply(Granted(lease("t", 1, "c"), 1.0))
    cluster.apply(InventoryChanged(NODES[:2], 2.0))
    text = inventory_to_json(cluster.snapshot())
    assert " " not in text
    assert "61" not in text
    assert inventory_from_json(b"7", text.encode()) == Inventory(b"7", NODES, ("c",))


def test_a_state_is_read_back_from_its_parts() -> None:
    snapshot = Snapshot(
        9,
        12,
        5,
        NODES,
        (lease("t", 3),),
        (PendingRequest(Request("w"), 2.0, 2),),
        (Drained("c", 4.0),),
        last_node="b",
    )
    parts = parts_of(snapshot)
    assert parts[::3] == ["lease", "pending", "drained"]
    assert parts[1::3] == ["t", "w", "c"]
    leases, pending, drained = (
        {name: text.encode()} for name, text in zip(parts[1::3], parts[2::3], strict=True)
    )
    assert read(leases=leases, pending=pending, drained=drained) == snapshot
    granted = change_from_json(leases["t"])
    assert isinstance(granted, Granted)
    assert granted.at == 1.0


def test_a_release_is_remembered_if_it_names_servers_on_which_its_job_did_not_start() -> None:
    failed = Released("t", 7, 5.0, "FAILED", reason="refused", failed_nodes=("a",))
    ended = Released("t", 7, 5.0, reason="its user ended it")
    assert "failed" not in [name for name, _, _ in steps(ended)]
    assert steps(failed)[-1] == ["failed", "256", change_to_json(failed)]
    snapshot = Snapshot(9, 12, 5, NODES, last_node="b", failed_starts=(failed,))
    parts = parts_of(snapshot)
    assert parts[:2] == ["rule", "failed_starts"]
    assert read(rules={"failed_starts": parts[2].encode()}) == snapshot
    with pytest.raises(CorruptStateError):
        read(rules={"failed_starts": OTHER})


def test_what_is_known_of_gpus_is_read_back_without_nodes_that_left() -> None:
    snapshot = Snapshot(
        9,
        12,
        5,
        NODES,
        last_node="b",
        watched=("b",),
        silent=(AgentLost("b", 99.5, 39.5),),
        closed_gpus=(GpuClosed("a", 1, "GPU-1", "xid 79", 2.5, stop=True),),
        opened_gpus=(GpuOpened("b", 0, 3.5),),
        cleaning=(Cleaning("b", 1, "GPU-7", 7, 400, "t", 1763814469.123457, {"dag_id": "d"}, 4),),
    )
    parts = parts_of(replace(snapshot, watched=("b", "gone")))
    gpus = dict(zip(parts[1::3], map(str.encode, parts[2::3]), strict=True))
    assert read(gpus=gpus) == snapshot
    for name, value in (
        ("cleaning 1 7 b", b"x"),
        ("cleaning 1 b", gpus["cleaning 1 7 b"]),
        ("gpu 1 a", OTHER),
    ):
        with pytest.raises(CorruptStateError):
            read(gpus={name: value})


OTHER = field(Drained("x", 1.0))


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"leases": {"t": OTHER}}, r'^not a lease: b\'{"change":"drained"'),
        ({"pending": {"t": OTHER}}, r'^not a pending request: b\'{"change":"drained"'),
        (
            {"leases": {"t": field(Granted(lease("t", 1), 1.0))}, "renewals": {"t": OTHER}},
            r'^not a renewal: b\'{"change":"drained"',
        ),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(parts: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CorruptStateError, match=complaint):
        read(**parts)


@pytest.mark.parametrize("text", [b"{", b"\xff"])
def test_an_inventory_that_is_not_json_is_corrupt(text: bytes) -> None:
    with pytest.raises(CorruptStateError, match=r"^the inventory in Redis is not JSON: "):
        inventory_from_json(b"7", text)


@pytest.mark.parametrize(("fencing", "sequence"), [(b"x", b"0"), (b"0", b""), (b"1.5", b"0")])
def test_a_counter_that_is_not_a_number_is_corrupt(fencing: bytes, sequence: bytes) -> None:
    inventory = Inventory(b"1", (), ())
    with pytest.raises(CorruptStateError, match="not a whole number"):
        read_state(1, [fencing, sequence, b"", [], [], [], [], [], [], [], [], []], inventory)


def test_an_unreadable_last_node_is_replaced() -> None:
    state = read_state(1, [b"0", b"0", b"\xff", [], [], [], [], [], [], [], [], []], Inventory(b"1", (), ()))
    assert state.last_node == "\N{REPLACEMENT CHARACTER}"
