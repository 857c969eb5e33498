"""Changes and states are read back as written, and wrong data is refused in one line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from resource_manager import STORED_FORMAT
from resource_manager.core.changes import (
    Announced,
    Cancelled,
    Change,
    DeadlineRisk,
    Drained,
    Expired,
    Granted,
    InventoryChanged,
    JobPlaced,
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
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request, Spread
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import CorruptStateError, InvalidRequestError, NewerFormatError
from resource_manager.storage import codec

NODE = Node("a", 0, {"cpus": 64, "compute_tflops": 57.6}, (Gpu(0, "A100"), Gpu(1, "A100", memory_mib=81920)))
REQUEST = Request("t", gpus=1, gpu_milli=250, resources={"cpus": 2}, ttl_s=60.0, labels={"dag": "d"})
GANG = Lease(
    Request("g", 1, nodes=2, spread=Spread.PACK, same="rack", prefer_same="row"),
    (Placement("a", (0,), port=29500), Placement("a", (1,))),
    9,
    1.5,
)
CHANGES: list[Change] = [
    Granted(Lease(REQUEST, (Placement("a", (1,)),), 7, 1.5, 61.5, queued_at=0.25), 1.5),
    Granted(Lease(Request("u"), (Placement("a"),), 8, 1.5, math.inf), 1.5),
    Granted(GANG, 1.5),
    Released("t", 7, 2.0, "SUCCESS"),
    MembersReleased("g", 9, (0, 2), 2.0, "FAILED"),
    Preempting("t", 7, "u", 62.0, 2.0),
    Renewed("t", 7, 2.0, 62.0),
    Renewed("t", 7, 2.0, 62.0, checkpoint_at=1.75),
    Renewed("u", 8, 2.0),
    Expired("t", 7, 70.0),
    Quarantined("t", 7, 70.0),
    Queued(REQUEST, 1.0, 1, 1.0),
    Cancelled("t", 1.0, "gave up"),
    DeadlineRisk("t", 1.0, 9.5),
    Announced(REQUEST, 1.0, ("a/b",), 0),
    Withdrawn("t", 1.0),
    Drained("a", 1.0, "maintenance", failed=True),
    Resumed("a", 2.0, by="airflow:prod/etl/train"),
    MaintenanceChanged((Window(1, ("s1",), 100.5, 200.0, 604800.0, "fans", True),), 3.0),
    TeamsChanged(
        Teams((Team("v", 3, {"A100": 3}, 4, parent="r", max_runtime_s=9.5),), True),
        3.0,
        lines=("teams.v.guaranteed: 2 -> 3",),
        by="ada",
    ),
    InventoryChanged((NODE,), 3.0),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: type(c).__name__)
def test_a_change_is_read_back_from_json_and_dict(change: Change) -> None:
    assert codec.change_from_json(codec.change_to_json(change)) == change
    assert codec.change_from_json(codec.change_to_json(change).encode()) == change
    assert codec.change_from_dict(codec.change_to_dict(change)) == change


def test_a_lease_of_one_server_is_written_without_any_field_of_gangs() -> None:
    text = codec.change_to_json(CHANGES[0])
    for word in ("nodes", "spread", "same", "ranks", "port"):
        assert word not in text
    stored = codec.snapshot_to_dict(ClusterState([NODE]).snapshot())
    assert stored.keys() == {"format", "version", "last_fencing_token", "sequence", "nodes"}
    assert "gang_ports" not in stored["nodes"][0]


def test_amounts_keep_their_type() -> None:
    change = InventoryChanged((NODE,), 3.0)
    again = codec.change_from_json(codec.change_to_json(change))
    assert isinstance(again, InventoryChanged)
    (node,) = again.nodes
    assert [type(value) for value in node.resources.values()] == [int, float]


def test_a_state_is_read_back_from_its_snapshot() -> None:
    cluster = ClusterState([NODE])
    for change in (CHANGES[0], Queued(Request("w", priority=3), 2.0, 1, 2.0), Drained("a", 3.0)):
        cluster.apply(change)
    snapshot = cluster.snapshot()
    again = codec.snapshot_from_dict(codec.snapshot_to_dict(snapshot))
    assert again == snapshot
    assert ClusterState.from_snapshot(again).snapshot() == snapshot


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"change":"granted","at":1}',
        '{"change":"nonsense"}',
        '{"at":1}',
        '{"change":"released"}',
        b'{"change":"released","task_id":"\xff"}',
    ],
)
def test_invalid_changes_are_refused_in_one_line(text: str | bytes) -> None:
    with pytest.raises(CorruptStateError) as caught:
        codec.change_from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({"change": "teleported", "lease_id": "t", "at": 1.0}, "'teleported'"),
        ({**codec.change_to_dict(Drained("a", 3.0)), "un\ntil": 9.0}, r"'un\\ntil' of a drained change"),
        ({**codec.change_to_dict(Drained("a", 3.0)), "until": 9.0}, "'until' of a drained change"),
        (
            {
                "change": "queued",
                "request": {"lease_id": "t", "sockets": 2},
                "queued_at": 1,
                "sequence": 1,
                "at": 1,
            },
            "'sockets' of a queued change",
        ),
    ],
)
def test_a_change_of_a_newer_version_is_refused_as_newer(change: dict[str, Any], unknown: str) -> None:
    """Ignoring what it does not know, a reader would grant one server to a request for two."""
    message = f"does not know (the change )?{unknown}: upgrade it"
    with pytest.raises(NewerFormatError, match=message):
        codec.change_from_dict(change)
    with pytest.raises(NewerFormatError, match=message):
        codec.change_from_json(json.dumps(change))


def test_fields_at_their_defaults_are_not_written() -> None:
    lease = Lease(Request("t", 1), (Placement("a", (0,)),), 3, 1.0)
    assert codec.change_to_dict(Granted(lease, 1.0)) == {
        "change": "granted",
        "lease": {
            "request": {"lease_id": "t", "gpus": 1},
            "members": [{"node": "a", "gpu_ids": [0]}],
            "fencing_token": 3,
            "granted_at": 1.0,
        },
        "at": 1.0,
    }


def test_a_newer_format_is_refused() -> None:
    value = codec.snapshot_to_dict(ClusterState([NODE]).snapshot())
    with pytest.raises(CorruptStateError, match="upgrade"):
        codec.snapshot_from_dict({**value, "format": STORED_FORMAT + 1})


@pytest.mark.parametrize(
    "change",
    [
        JobPlaced("t", 7, ("a",), 2.0),  # type: ignore[arg-type]
        Renewed("t", 7, 2.0, 62.0, checkpoint_at="1"),  # type: ignore[arg-type]
        Cancelled("\ud800", 1.0, ""),
    ],
)
def test_what_could_not_be_read_back_is_not_written(change: Change) -> None:
    with pytest.raises(InvalidRequestError, match=r"^a [a-z]+ change cannot be stored: .+") as caught:
        codec.change_to_json(change)
    assert "\n" not in str(caught.value)
