"""Servers, leases and totals as plain values for the templates of the console."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.models import MILLI_PER_GPU, Amount, Lease, Request
from resource_manager.jobs.task_identity import task_of
from resource_manager.manager.serializers import Usage, cpu_usage, gpu_usage, server_state, short_name
from resource_manager.rest.auth import Identity
from resource_manager.rest.console import colours
from resource_manager.rest.console.colours import Colour, Holder
from resource_manager.rest.service import Service

LEVELS = 8
CELLS_PER_LINE = 8


@dataclass(slots=True)
class Cell:
    """Cell of one GPU, or of `span` neighbours of one lease: CSS classes, text and tooltip."""

    classes: str
    text: str
    title: str
    task_id: str = ""
    span: int = 1


@dataclass(frozen=True, slots=True)
class ServerRow:
    server_id: int
    name: str
    state: str
    reason: str
    cells: list[Cell]
    gpus: Usage
    cpus: Usage
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
    uuids: str
    cpus: str
    owner: str
    team: str
    granted_at: float
    expires_at: float | None
    fencing_token: int
    quarantined: bool
    colour: str
    link: str | None
    may_release: bool


def colours_of(cluster: ClusterState, shown: Iterable[Lease]) -> dict[str, Colour]:
    """Return the colours of leases, unique among all leases, or among `shown` if there are too many."""
    few = len(cluster.leases) <= 2 * colours.HALF
    everything = (*cluster.leases.values(), *cluster.remainders.values())
    return colours.assign(
        Holder(
            lease.key,
            cluster.by_name[lease.placement.node].node.server_id,
            cluster.by_name[lease.placement.node].gpu_ids_of(lease.placement),
            lease.request.gpu_milli,
            lease.fencing_token,
        )
        for lease in (everything if few else shown)
    )


def css_classes(colour: Colour) -> str:
    """Return the console's CSS classes of a colour; its content policy allows no inline styles."""
    return f"held h{colour.hue} v{colour.level}" + (" pale" if colour.pale else "")


def server_rows(cluster: ClusterState, states: Iterable[NodeState]) -> list[ServerRow]:
    states = list(states)
    found = colours_of(cluster, [lease for state in states for lease in state.leases.values()])
    return [_server_row(state, found) for state in states]


def _server_row(state: NodeState, found: dict[str, Colour]) -> ServerRow:
    return ServerRow(
        state.node.server_id,
        state.name,
        server_state(state),
        "" if state.drained is None else state.drained.reason,
        _cells(state, found),
        gpu_usage(state),
        cpu_usage(state),
        len(state.leases),
        ", ".join(sorted({gpu.gpu_type for gpu in state.node.gpus if gpu.gpu_type})),
        state.node.address,
        state.is_open,
        state.retired,
    )


def _cells(state: NodeState, found: dict[str, Colour]) -> list[Cell]:
    """Return a cell for each GPU; neighbours allocated whole to one lease are joined to one bar."""
    holders: dict[int, list[Lease]] = {}
    for lease in state.leases.values():
        for member in lease.on(state.name):
            for gpu_id in state.gpu_ids_of(member):
                holders.setdefault(gpu_id, []).append(lease)
    cells: list[Cell] = []
    for place, (gpu_id, free_milli) in enumerate(state.gpu_free.items()):
        leases = holders.get(gpu_id, [])
        cell = _cell(gpu_id, free_milli, leases, found, is_open=state.is_open)
        before = cells[-1] if cells else None
        joins = before is not None and before.task_id == cell.task_id != "" and not free_milli
        if before is not None and joins and len(leases) == 1 and place % CELLS_PER_LINE:
            before.span += 1
            before.title = f"GPU {gpu_id - before.span + 1}{before.title[before.title.index(':') :]}"
        else:
            cells.append(cell)
    return cells


def _cell(
    gpu_id: int, free_milli: int, leases: list[Lease], found: dict[str, Colour], *, is_open: bool
) -> Cell:
    if not leases:
        word = "free" if is_open else "closed"
        return Cell(f"cell {word}", word, f"GPU {gpu_id}: {word}")
    first = leases[0]
    who = ", ".join(
        f"{lease.lease_id} ({lease.request.owner})" if lease.request.owner else lease.lease_id
        for lease in leases
    )
    classes = f"cell {css_classes(found[first.key])}"
    text = short_name(first.lease_id) if len(leases) == 1 else f"{len(leases)} leases"
    if free_milli:
        classes += f" share p{(MILLI_PER_GPU - free_milli) * 4 // MILLI_PER_GPU}"
        who += f"; {free_milli} milli {'free' if is_open else 'closed'}"
    if any(lease.quarantined for lease in leases):
        classes += " quarantined"
        text = f"⚠ {text}"
        who += "; quarantined"
    return Cell(classes, text, f"GPU {gpu_id}: {who}", first.key)


def level(state: NodeState) -> int:
    """Return the allocated part of a server for the map: from 0 (free) to `LEVELS` (full)."""
    total = MILLI_PER_GPU * len(state.gpu_free)
    return math.ceil(LEVELS * (total - state.free_milli) / total) if total else LEVELS


def lease_row(
    cluster: ClusterState, lease: Lease, colour: Colour, caller: Identity, service: Service
) -> LeaseRow:
    request = lease.request
    share = "" if request.gpu_milli == MILLI_PER_GPU else f" ({request.gpu_milli} milli)"
    gpu_ids = [cluster.by_name[member.node].gpu_ids_of(member) for member in lease.members]
    return LeaseRow(
        lease.lease_id,
        ", ".join(dict.fromkeys(member.node for member in lease.members)),
        "; ".join(",".join(map(str, ids)) for ids in gpu_ids) + share,
        ", ".join(uuid for member in lease.members for uuid in member.gpu_uuids),
        f"{len(lease.members) * request.resources.get('cpus', 0):g}",
        request.owner,
        request.team,
        lease.granted_at,
        None if lease.expires_at == math.inf else lease.expires_at,
        lease.fencing_token,
        lease.quarantined,
        css_classes(colour),
        task_link(request, service),
        caller.is_operator or request.owner == caller.name,
    )


def task_link(request: Request, service: Service) -> str | None:
    """Return the URL of the request's task in Airflow; None if it is unknown."""
    labels = request.labels
    parts = task_of(labels)
    if service.airflow_url is None or parts is None:
        return None
    if service.instance is not None and labels.get("instance", service.instance) != service.instance:
        return None  # the task of another Airflow, whose address is unknown
    dag, run, task = (quote(part, safe="") for part in parts[:3])
    suffix = f"/mapped/{parts[3]}" if parts[3] >= 0 else ""
    path = f"/dags/{dag}/runs/{run}/tasks/{task}{suffix}"
    return service.airflow_url.rstrip("/") + path


def totals(cluster: ClusterState) -> dict[str, Any]:
    """Return the figures at the top of the page."""
    return {
        "servers": len(cluster.nodes),
        "closed": sum(not state.is_open for state in cluster.nodes),
        "gpus": _sum(map(gpu_usage, cluster.nodes)),
        "cpus": _sum(map(cpu_usage, cluster.nodes)),
        "leases": len(cluster.leases) + len(cluster.remainders),
        "waiting": len(cluster.pending),
        "version": cluster.version,
    }


def _sum(usages: Iterable[Usage]) -> Usage:
    free: Amount = 0
    closed: Amount = 0
    total: Amount = 0
    for usage in usages:
        free, closed, total = free + usage.free, closed + usage.closed, total + usage.total
    return Usage(free, closed, total)


def matching(states: Iterable[NodeState], text: str, wanted: str) -> list[NodeState]:
    """Return the servers in a state whose name, or the task id of a lease on them, contains the text."""
    text = text.casefold()
    found = []
    for state in states:
        if wanted and server_state(state) != wanted:
            continue
        if text and text not in state.name.casefold() and not any(text in t.casefold() for t in state.leases):
            continue
        found.append(state)
    return found
