"""What the console shows of servers, leases and the queue, as plain values for templates."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from resource_manager.api.auth import Identity
from resource_manager.api.service import Service
from resource_manager.cluster import ClusterState, NodeState
from resource_manager.models import MILLI_PER_GPU, Lease, Request
from resource_manager.views import server_state

HUES = 12
LEVELS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One GPU: css classes and what it says when asked."""

    classes: str
    title: str
    task_id: str


@dataclass(frozen=True, slots=True)
class ServerRow:
    server_id: int
    name: str
    state: str
    reason: str
    cells: list[Cell]
    free_gpus: int
    total_gpus: int
    free_cpus: str
    held_cpus: str
    total_cpus: str
    tasks: int
    types: str
    address: str
    is_open: bool
    retired: bool


@dataclass(frozen=True, slots=True)
class LeaseRow:
    task_id: str
    server: str
    gpus: str
    cpus: str
    owner: str
    team: str
    granted_at: float
    expires_at: float | None
    fencing_token: int
    quarantined: bool
    hue: int
    link: str | None
    may_release: bool


def hue(task_id: str) -> int:
    """The same colour for the same holder on every page."""
    return zlib.crc32(task_id.encode("utf-8", "replace")) % HUES


def server_row(state: NodeState) -> ServerRow:
    holders: dict[int, list[Lease]] = {}
    for lease in state.leases.values():
        for gpu_id in lease.placement.gpu_ids:
            holders.setdefault(gpu_id, []).append(lease)
    total = state.node.resources.get("cpus", 0)
    free = state.free.get("cpus", 0)
    return ServerRow(
        state.node.server_id,
        state.name,
        server_state(state),
        "" if state.drained is None else state.drained.reason,
        [_cell(gpu_id, free_milli, holders.get(gpu_id, [])) for gpu_id, free_milli in state.gpu_free.items()],
        state.whole_free,
        len(state.gpu_free),
        f"{free:g}",
        f"{total - free:g}",
        f"{total:g}",
        len(state.leases),
        ", ".join(sorted({gpu.gpu_type for gpu in state.node.gpus if gpu.gpu_type})),
        state.node.address,
        state.is_open,
        state.retired,
    )


def _cell(gpu_id: int, free_milli: int, leases: list[Lease]) -> Cell:
    if not leases:
        return Cell("cell", f"GPU {gpu_id}: free", "")
    who = ", ".join(
        f"{lease.task_id} ({lease.request.owner})" if lease.request.owner else lease.task_id
        for lease in leases
    )
    classes = f"cell h{hue(leases[0].task_id)}"
    if free_milli:
        classes += f" share p{(MILLI_PER_GPU - free_milli) * 4 // MILLI_PER_GPU}"
        who += f"; {free_milli} milli free"
    if any(lease.quarantined for lease in leases):
        classes += " quarantined"
        who += "; in quarantine"
    return Cell(classes, f"GPU {gpu_id}: {who}", leases[0].task_id)


def level(state: NodeState) -> int:
    """How full a server is: 0 (free) to `LEVELS` (full), for the map of all servers."""
    total = MILLI_PER_GPU * len(state.gpu_free)
    return math.ceil(LEVELS * (total - state.free_milli) / total) if total else LEVELS


def lease_row(lease: Lease, caller: Identity, here: Service) -> LeaseRow:
    request = lease.request
    share = "" if request.gpu_milli == MILLI_PER_GPU else f" ({request.gpu_milli} milli)"
    return LeaseRow(
        lease.task_id,
        lease.placement.node,
        ",".join(map(str, lease.placement.gpu_ids)) + share,
        f"{request.resources.get('cpus', 0):g}",
        request.owner,
        request.team,
        lease.granted_at,
        None if lease.expires_at == math.inf else lease.expires_at,
        lease.fencing_token,
        lease.quarantined,
        hue(lease.task_id),
        task_link(request, here),
        caller.is_operator or request.owner == caller.name,
    )


def task_link(request: Request, here: Service) -> str | None:
    """The page of the Airflow task that holds the lease, where it can be known."""
    labels = request.labels
    if here.airflow_url is None or not all(labels.get(key) for key in ("dag_id", "run_id", "task_id")):
        return None
    if here.instance is not None and labels.get("instance", here.instance) != here.instance:
        return None  # another Airflow's, whose pages are elsewhere
    dag, run, task = (quote(labels[key], safe="") for key in ("dag_id", "run_id", "task_id"))
    mapped = labels.get("map_index", "-1")
    suffix = f"/mapped/{quote(mapped)}" if mapped not in ("", "-1") else ""
    return f"{here.airflow_url.rstrip('/')}/dags/{dag}/runs/{run}/tasks/{task}{suffix}"


def totals(cluster: ClusterState) -> dict[str, Any]:
    """The figures at the head of the page."""
    return {
        "servers": len(cluster.nodes),
        "closed": sum(not state.is_open for state in cluster.nodes),
        "gpus": sum(len(state.gpu_free) for state in cluster.nodes),
        "free_gpus": sum(state.whole_free for state in cluster.nodes),
        "leases": len(cluster.leases),
        "waiting": len(cluster.waiting),
        "version": cluster.version,
    }


def matching(states: Iterable[NodeState], text: str, wanted: str) -> list[NodeState]:
    """Servers whose name or a holder contains the text, in the wanted state."""
    text = text.casefold()
    found = []
    for state in states:
        if wanted and server_state(state) != wanted:
            continue
        if text and text not in state.name.casefold() and not any(text in t.casefold() for t in state.leases):
            continue
        found.append(state)
    return found
