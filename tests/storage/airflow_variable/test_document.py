"""The JSON document of the Variable store: its readable part, and reading it back."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any

import pytest

from resource_manager.core.changes import Change, Drained, Granted, Queued
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.errors import CorruptStateError, NewerFormatError
from resource_manager.storage.airflow_variable.document import Document, from_json, to_json

WHERE = "Airflow Variable 'v'"
SERVER: dict[str, Any] = {
    "server_id": 3,
    "server_name": "gpu-server-3",
    "total_gpus": 8,
    "available_gpus": [2, 3, 4, 5, 6, 7],
    "total_cpus": 64,
    "available_cpus": 56,
    "running_tasks": [
        {
            "task_id": "train-1",
            "allocated_gpus": [0, 1],
            "allocated_cpus": 8,
            "start_time": "2025-01-02T03:04:05+00:00",
        }
    ],
}


def task(task_id: str, *gpus: int) -> dict[str, Any]:
    return {**SERVER["running_tasks"][0], "task_id": task_id, "allocated_gpus": list(gpus)}


def original(*servers: dict[str, Any]) -> str:
    return json.dumps({"servers": list(servers), "last_updated": "2025-01-02T03:04:05"})


def written(*changes: Change, node: Node | None = None) -> dict[str, Any]:
    """Return the document of a cluster of one node after those changes."""
    cluster = ClusterState([node or Node("a", 0, {"cpus": 64}, (Gpu(0), Gpu(1)))])
    for change in changes:
        cluster.apply(change)
    value: dict[str, Any] = json.loads(to_json(Document(cluster, "epoch", "commit"), 1e9))
    return value


# ---- the readable part ----


def test_a_server_shows_free_capacity_and_running_tasks() -> None:
    lease = Lease(Request("t", 1, resources={"cpus": 4}), (Placement("a", (1,)),), 7, 1e9, math.inf)
    (server,) = written(Granted(lease, 1e9))["servers"]
    assert server == {
        "server_id": 0,
        "server_name": "a",
        "total_gpus": 2,
        "available_gpus": [0],
        "total_cpus": 64,
        "available_cpus": 60,
        "running_tasks": [
            {
                "task_id": "t",
                "allocated_gpus": [1],
                "allocated_cpus": 4,
                "start_time": "2001-09-09T01:46:40+00:00",
                "fencing_token": 7,
            }
        ],
        "open": True,
    }


def test_a_closed_server_is_not_open() -> None:
    assert written(Drained("a", 1.0))["servers"][0]["open"] is False


def test_a_server_without_cpus_shows_zero_cpus() -> None:
    lease = Lease(Request("t", 1), (Placement("a", (0,)),), 1, 0.0)
    (server,) = written(Granted(lease, 0.0), node=Node("a", 0, {}, (Gpu(0),)))["servers"]
    assert (server["total_cpus"], server["available_cpus"]) == (0, 0)
    assert server["running_tasks"][0]["allocated_cpus"] == 0


def test_a_document_has_no_superfluous_spaces() -> None:
    """A Variable is written completely at every commit, and limited to about 64 KiB in some databases."""
    text = to_json(Document(ClusterState([Node("a", 0, {"cpus": 64})]), "e", "c"), 0.0)
    assert " " not in text


# ---- reading back ----


def test_a_document_is_read_back_as_it_was() -> None:
    cluster = ClusterState([Node("a", 0, {"cpus": 64}, (Gpu(0), Gpu(1)))])
    lease = Lease(Request("t", 1, resources={"cpus": 4}), (Placement("a", (1,)),), 7, 1.0, 61.0)
    changes = (Granted(lease, 1.0), Queued(Request("w", 2), 2.0, 1, 2.0), Drained("a", 3.0))
    for change in changes:
        cluster.apply(change)
    document = Document(cluster, "epoch", "commit", True, tuple(enumerate(changes, 1)))
    again = from_json(to_json(document, 4.0), WHERE)
    assert again.cluster.snapshot() == cluster.snapshot()
    assert (again.incarnation, again.commit, again.operator_reset) == ("epoch", "commit", True)
    assert again.changes == document.changes


def test_missed_changes_are_complete_or_empty() -> None:
    """Part of the missed changes would lead a replica to a state that never existed."""
    cluster = ClusterState.from_snapshot(Snapshot(version=5, last_fencing_token=0, sequence=0, nodes=()))
    kept = tuple((version, Drained(f"n{version}", 0.0)) for version in (3, 4, 5))
    document = Document(cluster, "e", "c", changes=kept)
    assert document.missed_since(5) == ()
    assert document.missed_since(4) == (kept[2][1],)
    assert document.missed_since(2) == tuple(change for _, change in kept)
    assert document.missed_since(1) == (), "change 2 is no longer there"


def test_tasks_of_the_original_keep_their_gpus_until_release() -> None:
    document = from_json(original(SERVER), WHERE)
    assert (document.incarnation, document.commit, document.operator_reset, document.changes) == (
        "",
        "",
        False,
        (),
    )
    state = document.cluster.snapshot()
    assert (state.version, state.last_fencing_token, state.sequence) == (0, 1, 1)
    (lease,) = state.leases
    began = datetime.fromisoformat("2025-01-02T03:04:05+00:00").timestamp()
    request = Request("train-1", 2, resources={"cpus": 8})
    assert lease == Lease(request, (Placement("gpu-server-3", (0, 1)),), 1, began, math.inf, sequence=1)
    node = document.cluster.by_name["gpu-server-3"]
    assert (node.node.server_id, node.whole_free, node.free["cpus"]) == (3, 6, 56)


def test_tasks_of_the_original_get_a_fencing_token_each() -> None:
    document = from_json(original({**SERVER, "running_tasks": [task("a", 0), task("b", 1)]}), WHERE)
    assert {lease.lease_id: lease.fencing_token for lease in document.cluster.leases.values()} == {
        "a": 1,
        "b": 2,
    }
    assert document.cluster.last_fencing_token == 2


# ---- refusals ----


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not an object with a list of servers;"),
        ('{"servers": 3}', "it is not an object with a list of servers;"),
        ('{"servers": [{}]}', r"KeyError\('server_name'\)"),
        (original({**SERVER, "running_tasks": [task("a", 0), task("a", 1)]}), "it lists a task twice;"),
        (original({**SERVER, "running_tasks": [task("a", 0), task("b", 0)]}), "GPU 0 of 'gpu-server-3'"),
    ],
)
def test_a_refusal_names_place_reason_and_remedy(text: str, reason: str) -> None:
    with pytest.raises(CorruptStateError, match=f"^{WHERE} cannot be read .*: {reason}.*reset$"):
        from_json(text, WHERE)


def test_a_document_without_its_format_is_not_taken_for_an_original() -> None:
    value = written()
    del value["format"]
    with pytest.raises(CorruptStateError, match="the document names no format version"):
        from_json(json.dumps(value), WHERE)


def test_a_newer_document_is_refused_as_newer() -> None:
    text = json.dumps({**written(), "format": 7})
    with pytest.raises(NewerFormatError, match=f"^{WHERE}: the document was written in format 7"):
        from_json(text, WHERE)


def test_a_document_with_a_change_of_a_newer_version_is_refused_as_newer() -> None:
    text = json.dumps({**written(), "changes": [[1, {"change": "teleported", "at": 1.0}]]})
    with pytest.raises(NewerFormatError, match=f"^{WHERE}: .*'teleported': upgrade it"):
        from_json(text, WHERE)
