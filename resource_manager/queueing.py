"""The order in which waiting requests are looked at, live and in replay alike."""

from __future__ import annotations

from collections.abc import Callable

from resource_manager.cluster import ClusterState
from resource_manager.errors import PolicyError
from resource_manager.models import Waiting

Order = Callable[[ClusterState, float], list[Waiting]]
"""(cluster, now) -> the waiting requests, the next one to be served first."""

PRIORITY_AGEING_S = 3600.0
"""A waiting request gains one step of priority in this time, so that none starves."""


def fifo(cluster: ClusterState, now: float) -> list[Waiting]:
    """First come, first served."""
    return sorted(cluster.waiting.values(), key=lambda waiting: waiting.sequence)


def priority(cluster: ClusterState, now: float) -> list[Waiting]:
    """Highest priority first, growing by one step each `PRIORITY_AGEING_S` of waiting; then first come."""

    def key(waiting: Waiting) -> tuple[float, int]:
        aged = waiting.request.priority + (now - waiting.queued_at) / PRIORITY_AGEING_S
        return (-aged, waiting.sequence)

    return sorted(cluster.waiting.values(), key=key)


ORDERS: dict[str, Order] = {"fifo": fifo, "priority": priority}


def get_order(name: str) -> Order:
    """The queue order of that name; raises `PolicyError`."""
    try:
        return ORDERS[name]
    except KeyError:
        raise PolicyError(f"unknown queue order {name!r}; known are {', '.join(sorted(ORDERS))}") from None
