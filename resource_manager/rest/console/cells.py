"""Servers, leases and totals as plain values for the templates of the console."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from resource_manager.agent.report_format import GpuReport
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import cleaning_on
from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.models import MILLI_PER_GPU, Amount, Lease, Request
from resource_manager.core.name_lookup import contains
from resource_manager.core.names import display_name, is_hold, name_of, short_id, task_of
from resource_manager.core.node_state import NodeState
from resource_manager.fleet.server_use import KeptReport
from resource_manager.manager import serializers
from resource_manager.manager.answer_words import ranges
from resource_manager.manager.plurals import counted, times
from resource_manager.manager.server_views import Usage, closed_because, cpu_usage, gpu_usage, server_state
from resource_manager.rest.auth import Identity
from resource_manager.rest.console import colours
from resource_manager.rest.console.alerts import mark_of
from resource_manager.rest.console.colours import Colour, Holder
from resource_manager.rest.console.once_a_version import once_a_version
from resource_manager.rest.service import Service

LEVELS = 8
CELLS_PER_LINE = 8


@dataclass(frozen=True, slots=True)
class Bars:
    """Use of one GPU in tenths, None where it is not known."""

    utilization: int | None
    memory: int | None


@dataclass(slots=True)
class Cell:
    """Cell of one GPU, or of `span` neighbours of one lease: CSS classes, text and tooltip.

    `token` is its lease's fencing token, `since` when that was granted, `devices` are the numbers and UUIDs
    of its GPUs, `bars` their use if their server reports it.
    """

    classes: str
    text: str
    title: str
    task_id: str = ""
    tail: str = ""
    short_id: str = ""
    span: int = 1
    since: float | None = None
    team: str = ""
    rank: str = ""
    token: int | None = None
    devices: list[tuple[int, str]] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)

    @property
    def numbers(self) -> str:
        """Numbers of its GPUs: `3`, `0–3` or `0, 2`."""
        return ranges(gpu_id for gpu_id, _ in self.devices)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Maintenance that is on or comes next: its time in seconds since the epoch, and the servers' names."""

    begin: float
    end: float
    reason: str
    servers: tuple[str, ...]


def colours_of(cluster: ClusterState, shown: Iterable[Lease]) -> dict[str, Colour]:
    """Return the colours of leases, unique among all leases, or among `shown` if there are too many."""
    return _colours_of_all(cluster) if len(cluster.leases) <= 2 * colours.HALF else _colours(cluster, shown)


@once_a_version
def _colours_of_all(cluster: ClusterState) -> dict[str, Colour]:
    return _colours(cluster, (*cluster.leases.values(), *cluster.remainders.values()))


def _colours(cluster: ClusterState, leases: Iterable[Lease]) -> dict[str, Colour]:
    return colours.assign(
        Holder(
            lease.key,
            cluster.by_name[lease.placement.node].node.server_id,
            cluster.by_name[lease.placement.node].gpu_ids_of(lease.placement),
            lease.request.gpu_milli,
            lease.fencing_token,
        )
        for lease in leases
    )


def css_classes(colour: Colour) -> str:
    """Return the console's CSS classes of a colour; its content policy allows no inline styles."""
    return f"held h{colour.hue} v{colour.level}" + (" pale" if colour.pale else "")


def server_rows(cluster: ClusterState, states: list[NodeState], now: float) -> list[dict[str, Any]]:
    """Return what the templates show of servers."""
    found = colours_of(cluster, [lease for state in states for lease in state.leases.values()])
    windows = {name: window for window in coming_maintenance(cluster, now)[::-1] for name in window.servers}
    return [_server_row(state, found, windows.get(state.name)) for state in states]


def coming_maintenance(cluster: ClusterState, now: float) -> list[Maintenance]:
    """Return the maintenance that is on or comes next, the earliest first."""
    found = [
        Maintenance(*opening, window.reason, tuple(window.servers))
        for window in cluster.windows
        if (opening := window.occurrence(now)) is not None
    ]
    return sorted(found, key=lambda window: window.begin)


def _server_row(
    state: NodeState, colours: dict[str, Colour], maintenance: Maintenance | None
) -> dict[str, Any]:
    cpus = cpu_usage(state)
    return {
        "server_id": state.node.server_id,
        "name": state.name,
        "state": server_state(state),
        "reason": closed_because(state),
        "maintenance": maintenance,
        "cells": _cells(state, colours),
        "gpus": gpu_usage(state),
        "cpus": cpus,
        "cpus_tenths": _tenths(cpus.used / cpus.total) if cpus.total else 0,
        "tasks": len(state.leases),
        "types": ", ".join(sorted({gpu.gpu_type for gpu in state.node.gpus if gpu.gpu_type})),
        "address": state.node.address,
        "is_open": state.is_open,
        "retired": state.retired,
    }


def _cells(state: NodeState, colours: dict[str, Colour]) -> list[Cell]:
    """Return a cell for each GPU; neighbours allocated whole to one lease are joined to one bar."""
    holders: dict[int, list[Lease]] = {}
    for lease in state.leases.values():
        for gpu_id in {gpu_id for member in lease.on(state.name) for gpu_id in state.gpu_ids_of(member)}:
            holders.setdefault(gpu_id, []).append(lease)
    cells: list[Cell] = []
    for place, (gpu_id, free_milli) in enumerate(state.gpu_free.items()):
        leases = holders.get(gpu_id, [])
        cell = _cell(state, gpu_id, free_milli, leases, colours)
        cell.devices = [(gpu_id, state.gpu_uuids.get(gpu_id, ""))]
        before = cells[-1] if place % CELLS_PER_LINE else None
        if (
            before is not None
            and before.task_id == cell.task_id != ""
            and len(leases) == 1
            and not free_milli
            and not any(each in state.closed_gpus for each, _ in (*before.devices, *cell.devices))
        ):
            before.span += 1
            before.devices += cell.devices
            before.title = f"GPU {before.numbers}{before.title[before.title.index(':') :]}"
        else:
            cells.append(cell)
    return cells


def _cell(
    state: NodeState, gpu_id: int, free_milli: int, leases: list[Lease], colours: dict[str, Colour]
) -> Cell:
    closed = state.closed_gpus.get(gpu_id)
    icon, word = mark_of(closed)
    why = "" if closed is None else f"; closed: {closed.reason}"
    if not leases:
        if closed is None and (dirty := cleaning_on(state, gpu_id)):
            after = ", ".join(entry.name for entry in dirty)
            return Cell("cell closed", "◌ cleaning", f"GPU {gpu_id}: being cleaned after {after}")
        if closed is not None:
            classes = "cell closed fault" if icon else "cell closed"
            return Cell(classes, f"{icon} {word}".strip(), f"GPU {gpu_id}: {why[2:]}")
        word = "free" if state.is_open else "closed"
        return Cell(f"cell {word}", word, f"GPU {gpu_id}: {word}")
    first = leases[0]
    who = ", ".join(
        f"{name_of(lease)} ({lease.request.owner})" if lease.request.owner else name_of(lease)
        for lease in leases
    )
    classes = f"cell {css_classes(colours[first.key])}"
    name, bracket, index = display_name(first.lease_id, first.request.labels).partition("[")
    text = name if len(leases) == 1 else f"{len(leases)} leases"
    if free_milli:
        classes += f" share p{(MILLI_PER_GPU - free_milli) * 4 // MILLI_PER_GPU}"
        who += f"; {100 * free_milli / MILLI_PER_GPU:g}% {'free' if state.is_open else 'closed'}"
    if any(lease.quarantined for lease in leases):
        classes += " quarantined"
        text = f"⚠ {text}"
        who += "; quarantined"
    elif ending := [lease.preempted_by for lease in leases if lease.preempted_by]:
        text = f"⇤ {text}"
        who += f"; being preempted{f': {LIMITS[ending[0]]}' if ending[0] in LIMITS else ''}"
    if icon:
        classes += " fault"
        text = f"{icon} {text}"
    elif closed is not None:
        classes += " closing"
    cell = Cell(classes, text, f"GPU {gpu_id}: {who}{why}", first.key, token=first.fencing_token)
    if len(leases) == 1:
        cell.since, cell.team, cell.rank = first.granted_at, first.request.team, _rank(first, state.name)
        cell.tail, cell.short_id = bracket + index, short_id(first.sequence)
    return cell


def _rank(lease: Lease, node: str) -> str:
    """Return `rank 0 of 2` for the member of a gang on that node, empty for a lease of one server."""
    if lease.request.nodes == 1:
        return ""
    ranks = ", ".join(str(rank) for rank, member in lease.ranked if member.node == node)
    return f"rank {ranks} of {lease.request.nodes}"


def gpus_asked(request: Request) -> str:
    """Return the GPUs that a request asks for: `4 GPUs`, `2 × 8 GPUs`, `0.25 GPUs`."""
    return times(request.nodes, counted(request.gpus * request.gpu_milli / MILLI_PER_GPU, "GPU"))


def show_use(rows: Iterable[Mapping[str, Any]], reports: Mapping[str, KeptReport]) -> None:
    """Give the cells of servers that report their GPUs bars, and the figures in their tooltips."""
    for row in rows:
        found = reports.get(row["name"])
        if found is None or found.report.error is not None:
            continue
        by_uuid = {gpu.uuid: gpu for gpu in found.report.gpus}
        by_index = {gpu.index: gpu for gpu in found.report.gpus}
        for cell in row["cells"]:
            gpus = [by_uuid.get(uuid) if uuid else by_index.get(gpu_id) for gpu_id, uuid in cell.devices]
            cell.bars = [bars_of(gpu) for gpu in gpus]
            told = [use_in_words(gpu) for gpu in gpus if gpu is not None]
            cell.title += "".join(f"; {text}" for text in told if text)


def bars_of(gpu: GpuReport | None) -> Bars:
    """Return the bars of a reported GPU."""
    if gpu is None:
        return Bars(None, None)
    used, total = gpu.memory_used_mib, gpu.memory_mib
    return Bars(
        None if gpu.utilization_percent is None else _tenths(gpu.utilization_percent / 100),
        None if used is None or not total else _tenths(used / total),
    )


def _tenths(share: float) -> int:
    """Return how many tenths are used; what is used at all shows."""
    return min(math.ceil(share * 10), 10)


def use_in_words(gpu: GpuReport) -> str:
    """Return `71 % used, 62 of 80 GB`, as far as it is known."""
    parts = [] if gpu.utilization_percent is None else [f"{gpu.utilization_percent} % used"]
    if gpu.memory_used_mib is not None and gpu.memory_mib:
        parts.append(f"{gpu.memory_used_mib / 1024:.0f} of {gpu.memory_mib / 1024:.0f} GB")
    return ", ".join(parts)


def level(state: NodeState) -> int:
    """Return the allocated part of a server for the map: from 0 (free) to `LEVELS` (full)."""
    total = MILLI_PER_GPU * len(state.gpu_free)
    return math.ceil(LEVELS * (total - state.free_milli) / total) if total else LEVELS


def lease_row(
    cluster: ClusterState, lease: Lease, colour: Colour, caller: Identity, service: Service
) -> dict[str, Any]:
    """Return a lease as an allocation, with what its row in a table shows besides."""
    request = lease.request
    share = (
        "" if request.gpu_milli == MILLI_PER_GPU else f" ({100 * request.gpu_milli / MILLI_PER_GPU:g}% of it)"
    )
    gpu_ids = [cluster.by_name[member.node].gpu_ids_of(member) for member in lease.members]
    return {
        **serializers.allocation(cluster, lease),
        "server": ", ".join(dict.fromkeys(member.node for member in lease.members)),
        "gpus": "; ".join(ranges(ids) for ids in gpu_ids) + share,
        "uuids": ", ".join(uuid for member in lease.members for uuid in member.gpu_uuids),
        "cpus": f"{len(lease.members) * request.resources.get('cpus', 0):g}",
        "colour": css_classes(colour),
        "task_page": task_link(request, service),
        "may_end": caller.is_operator or request.owner == caller.name,
        "is_hold": is_hold(lease.lease_id, request.labels),
    }


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


@once_a_version
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
    """Return the servers in a state whose name, or a name of a lease on them, contains the text."""
    found = []
    for state in states:
        if wanted and server_state(state) != wanted:
            continue
        is_there = not text or text.casefold() in state.name.casefold()
        if not is_there and not any(contains(lease, text) for lease in state.leases.values()):
            continue
        found.append(state)
    return found
