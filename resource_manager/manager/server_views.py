"""Servers and their use, as they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import leases_on, withheld_milli
from resource_manager.core.models import MILLI_PER_GPU, Amount
from resource_manager.core.node_state import NodeState
from resource_manager.manager import serializers
from resource_manager.manager.cluster_results import (
    CleaningGpu,
    ClosedGpu,
    InventoryGpu,
    ServerDetail,
    ServerSummary,
)
from resource_manager.manager.results import Summary, answer_of
from resource_manager.manager.server_words import silence_of
from resource_manager.scheduling.accounting.gpu_hours import WASTED

RETIRED = "retired: it leaves once its leases have ended"

LEAST_SHOWN_HOURS = 0.05
"""Least GPU-hours that a table of tenths shows as more than none."""


def server_state(state: NodeState) -> str:
    """Return IDLE, PARTIAL, FULL or ERROR (original design, section 5.2), or DRAINED.

    ERROR: the server was marked as failed, its agent is silent, or a lease on it is quarantined.
    """
    is_broken = state.silent is not None or (state.drained is not None and state.drained.failed)
    if is_broken or any(lease.quarantined for lease in state.leases.values()):
        return "ERROR"
    if state.drained is not None or state.retired:
        return "DRAINED"
    if not state.leases:
        return "IDLE"
    return "FULL" if state.gpu_free and state.free_milli == 0 else "PARTIAL"


def closed_because(state: NodeState) -> str:
    """Return why the server takes no new leases: its drain's reason, that it leaves, its agent's silence."""
    silence = silence_of(state) and f"{silence_of(state)}; if its agent was removed, resume the server"
    reason = "" if state.drained is None else state.drained.reason
    return "; ".join(filter(None, (reason, RETIRED if state.retired else "", silence)))


RowT = TypeVar("RowT", bound=Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class Usage:
    """Amounts of a server's GPUs or CPUs: `free` can be granted now, `used` is allocated, `closed` neither.

    Unused capacity of a server that takes no new leases is closed, not free. The three add up to `total`.
    """

    free: Amount
    closed: Amount
    total: Amount

    @property
    def used(self) -> Amount:
        return self.total - self.free - self.closed


def usage_in_words(usage: Usage) -> str:
    """`4 free, 2 used, 2 closed of 8`."""
    return f"{usage.free:g} free, {usage.used:g} used, {usage.closed:g} closed of {usage.total:g}"


def wasted(row: Mapping[str, Any]) -> float:
    """Return the GPU-hours of a report's row that gave nothing."""
    return float(sum(row[name] for name in WASTED))


def most_wasted(rows: Iterable[RowT]) -> RowT | None:
    """Return the row of a report that wasted most, None if none wasted what a table shows."""
    return max((row for row in rows if wasted(row) >= LEAST_SHOWN_HOURS), key=wasted, default=None)


def gpu_usage(state: NodeState) -> Usage:
    """Return the usage of whole GPUs; a partly allocated GPU counts as used."""
    withheld = sum(milli == MILLI_PER_GPU for milli in withheld_milli(state).values())
    return _usage(state, state.whole_free, len(state.gpu_free), withheld)


def cpu_usage(state: NodeState) -> Usage:
    """Return the usage of CPUs; none is free if the inventory shrank below the leases."""
    return _usage(state, max(state.free.get("cpus", 0), 0), state.node.resources.get("cpus", 0))


def _usage(state: NodeState, unused: Amount, total: Amount, withheld: Amount = 0) -> Usage:
    """Return the usage; `withheld` is unused as well, but closed or being cleaned."""
    if state.is_open:
        return Usage(unused, withheld, total)
    return Usage(0, unused + withheld, total)


def server(state: NodeState) -> ServerSummary:
    """Return one server of the summary (original design, section 6.1.3), extended by closed capacity.

    `closed_gpus` and `closed_cpus` are the unused capacity of a drained, failed, silent or retired server,
    and the unused GPUs that are closed or being cleaned; none of it is in `available_gpus`, `available_cpus`
    or `free_gpu_milli`.
    """
    gpus, cpus = gpu_usage(state), cpu_usage(state)
    withheld = sum(withheld_milli(state).values())
    milli = _usage(state, state.free_milli, MILLI_PER_GPU * len(state.gpu_free), withheld)
    return {
        "server_id": state.node.server_id,
        "server_name": state.name,
        "available_gpus": gpus.free,
        "closed_gpus": gpus.closed,
        "total_gpus": gpus.total,
        "available_cpus": cpus.free,
        "closed_cpus": cpus.closed,
        "total_cpus": cpus.total,
        "running_tasks": len(state.leases),
        "gpu_utilization": _percent(milli.used, milli.total),
        "cpu_utilization": _percent(cpus.used, cpus.total),
        "state": server_state(state),
        "drained": state.drained is not None,
        "drain_reason": "" if state.drained is None else state.drained.reason,
        "drained_by": "" if state.drained is None else state.drained.by,
        "retired": state.retired,
        "address": state.node.address,
        "gpu_types": sorted({gpu.gpu_type for gpu in state.node.gpus if gpu.gpu_type}),
        "free_gpu_milli": {
            str(gpu_id): free if state.is_open else 0 for gpu_id, free in state.gpu_free.items()
        },
        "watched": state.watched,
        "silent_since": None if state.silent is None else state.silent.since,
        "gpus_closed": [
            answer_of(ClosedGpu, each, closed_at=each.at, closed_by=each.by)
            for _, each in sorted(state.closed_gpus.items())
        ],
        "gpus_cleaning": [
            answer_of(CleaningGpu, each, task_id=each.lease_id, gpu_milli=each.milli)
            for _, each in sorted(state.cleaning.items())
        ],
    }


def summary(cluster: ClusterState) -> Summary:
    """Return the resource summary (original design, section 6.1.3)."""
    return {
        "total_servers": len(cluster.nodes),
        "servers": [server(state) for state in cluster.nodes],
        "leases": len(cluster.leases) + len(cluster.remainders),
        "queue_length": len(cluster.pending),
        "version": cluster.version,
    }


def _percent(used: float, total: float) -> str:
    return f"{100 * used / total if total else 0:.1f}%"


def server_detail(cluster: ClusterState, name: str) -> ServerDetail:
    """Return a server of the summary, with its GPUs and the leases on each."""
    state = cluster.node(name)
    gpus = [
        answer_of(
            InventoryGpu,
            gpu,
            type=gpu.gpu_type,
            free_milli=state.gpu_free[gpu.gpu_id],
            task_ids=[lease.lease_id for lease in leases_on(state, gpu.gpu_id)],
        )
        for gpu in sorted(state.node.gpus, key=lambda gpu: gpu.gpu_id)
    ]
    return {
        **server(state),
        "gpus": gpus,
        "confine": serializers.confine_of(cluster, state.node),
        "writable": serializers.writable_of(cluster, state.node),
    }
