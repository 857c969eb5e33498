"""The state as the one JSON document that people read in Airflow's own pages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from resource_manager import STORED_FORMAT
from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.errors import CorruptStateError, NewerFormatError, ResourceManagerError
from resource_manager.scheduling import allocator
from resource_manager.storage import codec


@dataclass(frozen=True, slots=True)
class Document:
    """A state with the metadata that a store keeps.

    `incarnation` identifies a state from its first document on, `commit` the write of this document;
    `operator_reset` is true if an operator's reset started the state. `changes` are the last ones, with their
    versions, `once` the last idempotency keys: caller, key, what is kept, and until when. `closed` is why the
    state is closed, if it is. `suspended` is the last pause of grants, after a jump of the clock or a
    restore: its end, the jump in seconds (0 for a restore), and when it was stored.
    """

    cluster: ClusterState
    incarnation: str
    commit: str = ""
    operator_reset: bool = False
    changes: tuple[tuple[int, Change], ...] = ()
    once: tuple[tuple[str, str, str, float], ...] = ()
    closed: str = ""
    suspended: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def missed_since(self, version: int) -> tuple[Change, ...]:
        """Return the changes after `version`, or none if the document no longer has them all."""
        missed = tuple(change for number, change in self.changes if number > version)
        return missed if len(missed) == self.cluster.version - version else ()

    def id_of(self, version: int) -> str:
        """Return what tells the change that led to a version from another's, empty if it is not kept."""
        return next((repr(change.at) for number, change in self.changes if number == version), "")


def to_json(document: Document, now: float) -> str:
    """Return the document as JSON: `servers` and `last_updated` are for readers, `state` is authoritative."""
    cluster = document.cluster
    return json.dumps(
        {
            "servers": [_server(state) for state in cluster.nodes],
            "last_updated": _iso(now),
            "format": STORED_FORMAT,
            "version": cluster.version,
            "last_fencing_token": cluster.last_fencing_token,
            "incarnation": document.incarnation,
            "commit": document.commit,
            "operator_reset": document.operator_reset,
            "state": codec.snapshot_to_dict(cluster.snapshot()),
            "changes": [[version, codec.change_to_dict(change)] for version, change in document.changes],
            **({"once": document.once} if document.once else {}),
            **({"closed": document.closed} if document.closed else {}),
            **({"suspended": document.suspended} if any(document.suspended) else {}),
        },
        separators=(",", ":"),
    )


def from_json(text: str, where: str) -> Document:
    """Return the document, also from the original design's form, which has only `servers`.

    Raises `CorruptStateError`, whose message begins with `where`.
    """
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("servers"), list):
            raise CorruptStateError("it is not an object with a list of servers")
        document = _current(value) if "format" in value or "state" in value else _original(value["servers"])
        allocator.check(document.cluster)
        return document
    except NewerFormatError as error:
        raise NewerFormatError(f"{where}: {error}") from error
    except (
        ResourceManagerError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = f"{error}" if isinstance(error, ResourceManagerError | ValueError) else repr(error)
        raise CorruptStateError(
            f"{where} cannot be read and was left unchanged: {reason}; repair it, or start over with a reset"
        ) from error


def _current(value: dict[str, Any]) -> Document:
    codec.check_format(value.get("format"), "the document")
    cluster = ClusterState.from_snapshot(codec.snapshot_from_dict(value["state"]))
    changes = tuple((int(version), codec.change_from_dict(change)) for version, change in value["changes"])
    once = tuple((str(c), str(k), str(text), float(until)) for c, k, text, until in value.get("once", ()))
    until, clock_jump_s, at = value.get("suspended", (0.0, 0.0, 0.0))
    return Document(
        cluster,
        str(value["incarnation"]),
        str(value["commit"]),
        bool(value["operator_reset"]),
        changes,
        once,
        str(value.get("closed", "")),
        (float(until), float(clock_jump_s), float(at)),
    )


def _original(servers: Sequence[dict[str, Any]]) -> Document:
    """Import a document of the original: its tasks keep their GPUs until they are released.

    They were started without a time to live, so their leases do not expire.
    """
    nodes = tuple(
        Node(
            str(server["server_name"]),
            int(server["server_id"]),
            {"cpus": int(server["total_cpus"])},
            tuple(Gpu(gpu_id) for gpu_id in range(int(server["total_gpus"]))),
        )
        for server in servers
    )
    leases: list[Lease] = []
    for server in servers:
        for task in server["running_tasks"]:
            gpu_ids = tuple(int(gpu_id) for gpu_id in task["allocated_gpus"])
            cpus = int(task["allocated_cpus"])
            request = Request(str(task["task_id"]), len(gpu_ids), resources={"cpus": cpus})
            placement = Placement(str(server["server_name"]), gpu_ids)
            began = datetime.fromisoformat(str(task["start_time"])).timestamp()
            number = len(leases) + 1
            leases.append(Lease(request, (placement,), number, began, math.inf, sequence=number))
    if len({lease.lease_id for lease in leases}) != len(leases):
        raise CorruptStateError("it lists a task twice")
    snapshot = Snapshot(
        version=0, last_fencing_token=len(leases), sequence=len(leases), nodes=nodes, leases=tuple(leases)
    )
    return Document(ClusterState.from_snapshot(snapshot), incarnation="")


def _server(state: NodeState) -> dict[str, Any]:
    """Return a server as in the original design (section 6.1.1); `open`: it takes new tasks."""
    return {
        "server_id": state.node.server_id,
        "server_name": state.name,
        "total_gpus": len(state.gpu_free),
        "available_gpus": [
            gpu_id for gpu_id, free in state.gpu_free.items() if state.is_open and free == MILLI_PER_GPU
        ],
        "total_cpus": state.node.resources.get("cpus", 0),
        "available_cpus": state.free.get("cpus", 0) if state.is_open else 0,
        "running_tasks": [
            _task(lease, member) for lease in state.leases.values() for member in lease.on(state.name)
        ],
        "open": state.is_open,
    }


def _task(lease: Lease, member: Placement) -> dict[str, Any]:
    return {
        "task_id": lease.lease_id,
        "allocated_gpus": list(member.gpu_ids),
        "allocated_cpus": lease.request.resources.get("cpus", 0),
        "start_time": _iso(lease.granted_at),
        "fencing_token": lease.fencing_token,
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
