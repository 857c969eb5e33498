"""Admission by price: a task with a utility starts only where its utility exceeds the price.

The prices are those of OASiS (Bao et al., INFOCOM 2018): they grow exponentially with use, which keeps the
last free GPUs for tasks of high utility. Unlike there, nothing is planned ahead: the price is that of the
server on which the task would start now, for its expected runtime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.gangs import Members

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Quote:
    """Price of a start on a server now, and the utility at the expected completion.

    `price` is for the expected runtime; it and `utility` are None for a request without a utility.
    """

    price_per_hour: float
    price: float | None
    utility: float | None

    @property
    def covered(self) -> bool:
        """Return True if the task may start; one without a utility always may."""
        return self.price is None or self.utility is None or self.utility > self.price


@dataclass(frozen=True, slots=True)
class PriceAdmission:
    """Prices of a server: `low` when it is idle, `high` when it is full.

    Both are utility per hour for all of one resource of one server. A task that asks for a quarter of a
    server's GPUs pays a quarter of the price of its GPUs, likewise for CPUs and all other resources; the
    prices of the resources add up.
    """

    low: float
    high: float

    def price_per_hour(self, state: NodeState, request: Request) -> float:
        """Return the price per hour of the requested resources, at the server's current use."""
        price = 0.0
        milli = MILLI_PER_GPU * len(state.gpu_free)
        if request.gpus and milli:
            share = request.gpus * request.gpu_milli / milli
            price += share * self._of_whole(1 - state.free_milli / milli)
        for name, amount in request.resources.items():
            total = state.node.resources.get(name, 0)
            if amount and total:
                price += amount / total * self._of_whole(1 - state.free[name] / total)
        return price

    def quote(
        self, cluster: ClusterState, request: Request, members: Members, queued_at: float, now: float
    ) -> Quote:
        """Return the price of the members' servers and the utility of the task if it starts there now."""
        per_hour = sum(self.price_per_hour(cluster.by_name[member.node], request) for member in members)
        if request.utility is None or request.expected_runtime_s is None:
            return Quote(per_hour, None, None)
        runtime_s = request.expected_runtime_s
        return Quote(
            per_hour,
            per_hour * runtime_s / SECONDS_PER_HOUR,
            request.utility.of(now - queued_at + runtime_s),
        )

    def admits(
        self, cluster: ClusterState, request: Request, members: Members, queued_at: float, now: float
    ) -> bool:
        """Return True if the task may start at these placements now."""
        return self.quote(cluster, request, members, queued_at, now).covered

    def _of_whole(self, used_share: float) -> float:
        return self.low * math.pow(self.high / self.low, min(max(used_share, 0.0), 1.0))
