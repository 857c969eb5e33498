"""Admission by price: a task with a utility starts only where that covers what it takes.

The prices are those of OASiS (Bao et al., INFOCOM 2018): they grow exponentially with use, so the last free
GPUs are kept for tasks that are worth them. Unlike there, nothing is planned ahead: the price is that of the
server where the task would start now, for the runtime that it expects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from resource_manager.cluster import ClusterState, NodeState
from resource_manager.models import MILLI_PER_GPU, Placement, Request

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Quote:
    """What starting on a server now would cost, and what finishing in time is worth.

    `price` is for the expected runtime; it and `utility` are None for a request without a utility.
    """

    price_per_hour: float
    price: float | None
    utility: float | None

    @property
    def covered(self) -> bool:
        """Whether the task may start; one that names no utility always may."""
        return self.price is None or self.utility is None or self.utility > self.price


@dataclass(frozen=True, slots=True)
class PriceAdmission:
    """`low` and `high`: utility an hour for all of one resource of one server when it is idle, and full.

    A task that takes a quarter of a server's GPUs pays a quarter of the price of its GPUs, and likewise for
    its CPUs and whatever else it asks for; the prices of the resources add up.
    """

    low: float
    high: float

    def price_per_hour(self, state: NodeState, request: Request) -> float:
        """The price of an hour of what the request asks for, at the server's use of now."""
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

    def quote(self, state: NodeState, request: Request, queued_at: float, now: float) -> Quote:
        """The server's price and what the task is worth if it starts there now."""
        per_hour = self.price_per_hour(state, request)
        if request.utility is None or request.expected_runtime_s is None:
            return Quote(per_hour, None, None)
        runtime_s = request.expected_runtime_s
        return Quote(
            per_hour,
            per_hour * runtime_s / SECONDS_PER_HOUR,
            request.utility.of(now - queued_at + runtime_s),
        )

    def admits(
        self, cluster: ClusterState, request: Request, placement: Placement, queued_at: float, now: float
    ) -> bool:
        """Whether the task may start there now."""
        return self.quote(cluster.by_name[placement.node], request, queued_at, now).covered

    def _of_whole(self, used_share: float) -> float:
        return self.low * math.pow(self.high / self.low, min(max(used_share, 0.0), 1.0))
