"""What an operator should look at."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.changes import GpuClosed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import DRAINED, condition_of
from resource_manager.core.models import Lease
from resource_manager.core.names import name_of
from resource_manager.fleet.transitions import ROGUE
from resource_manager.manager.server_words import silence_of
from resource_manager.rest.console.once_a_version import once_a_version
from resource_manager.scheduling.queue import windows as maintenance


@dataclass(frozen=True, slots=True)
class Alert:
    """Fault that an operator should look at, and its server."""

    text: str
    server_id: int


@once_a_version
def alerts(cluster: ClusterState) -> list[Alert]:
    """Return what an operator should look at: failed and silent servers, faulty GPUs, quarantined leases."""
    found = []
    for state in cluster.nodes:
        at = state.node.server_id
        if state.drained is not None and state.drained.failed:
            found.append(Alert(f"{state.name} failed: {state.drained.reason or 'no reason given'}", at))
        if state.silent is not None:
            found.append(Alert(f"{state.name} has been {silence_of(state)}", at))
        for gpu_id, closed in state.closed_gpus.items():
            icon, word = mark_of(closed)
            if icon:
                found.append(Alert(f"{icon} {state.name} GPU {gpu_id} {word}: {closed.reason}", at))
    leases = (*cluster.leases.values(), *cluster.remainders.values())
    return found + [_alert(cluster, lease, "is quarantined") for lease in leases if lease.quarantined]


def under_maintenance(cluster: ClusterState, now: float) -> list[Alert]:
    """Return the leases on servers whose maintenance has begun, as alerts."""
    leases = maintenance.under_maintenance(cluster, now)
    return [_alert(cluster, lease, "still runs under maintenance") for lease in leases]


def _alert(cluster: ClusterState, lease: Lease, what: str) -> Alert:
    names = ", ".join(dict.fromkeys(member.node for member in lease.members))
    at = cluster.by_name[lease.placement.node].node.server_id
    return Alert(f"⚠ {name_of(lease)} on {names} {what}", at)


def mark_of(closed: GpuClosed | None) -> tuple[str, str]:
    """Return icon and word of a closed GPU: `⚠` for a process without a lease, `✖` for a fault.

    One that an operator closed has no icon.
    """
    if closed is None:
        return "", ""
    return {ROGUE: ("⚠", "rogue"), DRAINED: ("", "closed")}.get(condition_of(closed), ("✖", "closed"))
