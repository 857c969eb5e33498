"""Literal form of the paper's Algorithms 1 and 2, slow and plain, a reference for the fast form.

It reads free amounts from the cluster states one by one and computes prices with scalars, so that it shares
neither the array view nor the dynamic programme with `simulator.oasis.planner`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.oasis.ledger import NODE_RESOURCES, Ledger, Pool, demand_of
from simulator.oasis.model import GPU, RESOURCES, TrainingJob, Units
from simulator.oasis.prices import Prices

Deployment = dict[tuple[int, str, int], int]
"""(slot, role, server) -> number of workers or PS."""


@dataclass
class LiteralPlanner:
    """Algorithm 2 for one job on the ledger as it stands."""

    job: TrainingJob
    first: int
    ledger: Ledger
    prices: Prices

    def __post_init__(self) -> None:
        self.stored: dict[tuple[int, int], tuple[float, Deployment]] = {}

    def best(self) -> tuple[float, Deployment]:
        """Return the largest payoff over all end slots and its deployment; (0, {}) if none pays."""
        payoff: float = 0.0
        plan: Deployment = {}
        for end in range(self.first, self.ledger.slots):
            cost, deployment = self.dp_cost(end, self.job.work)
            if self.job.utility_at(end) - cost > payoff:
                payoff, plan = self.job.utility_at(end) - cost, deployment
        return payoff, plan

    def dp_cost(self, end: int, work: int) -> tuple[float, Deployment]:
        if work == 0:
            return 0.0, {}
        if end < self.first:
            return math.inf, {}
        if (end, work) not in self.stored:
            best: tuple[float, Deployment] = (math.inf, {})
            for done in range(work + 1):
                cost, deployment = self.cost_t(end, done)
                earlier, before = self.dp_cost(end - 1, work - done)
                if cost + earlier < best[0]:
                    best = (cost + earlier, {**before, **deployment})
            self.stored[end, work] = best
        return self.stored[end, work]

    def cost_t(self, slot: int, need: int) -> tuple[float, Deployment]:
        workers, worker_cost, deployment = self.fill(slot, self.ledger.worker, min(need, self.job.chunks))
        if workers < need:
            return math.inf, {}
        bandwidth, ps_bandwidth = self.job.worker[-1], self.job.ps[-1]
        wanted = min(math.ceil(bandwidth * workers / ps_bandwidth - 1e-9) if bandwidth else 0, workers)
        servers, ps_cost, ps_deployment = self.fill(slot, self.ledger.ps, wanted)
        if bandwidth * workers > ps_bandwidth * servers * (1 + 1e-9):
            return math.inf, {}
        return worker_cost + ps_cost, {**deployment, **ps_deployment}

    def fill(self, slot: int, pool: Pool, wanted: int) -> tuple[int, float, Deployment]:
        """Place as many as requested and possible, on the cheapest servers first."""
        demand = demand_of(self.job, pool.role)
        by_price = sorted(range(len(pool)), key=lambda server: self.price(slot, pool, server, demand))
        placed, cost, deployment = 0, 0.0, {}
        for server in by_price:
            count = min(self.room(slot, pool, server, demand), wanted - placed)
            if count > 0:
                placed += count
                cost += count * self.price(slot, pool, server, demand)
                deployment[slot, pool.role, server] = count
        return placed, cost, deployment

    def free(self, slot: int, pool: Pool, server: int) -> list[float]:
        node = self.ledger.states[slot].node(pool.nodes[server].name)
        return [node.whole_free if r == GPU else node.free[NODE_RESOURCES[r]] for r in range(len(RESOURCES))]

    def room(self, slot: int, pool: Pool, server: int, demand: Units) -> int:
        free = self.free(slot, pool, server)
        count = 0
        while count < self.job.chunks and all(
            (count + 1) * need <= have for need, have in zip(demand, free, strict=True)
        ):
            count += 1
        return count

    def price(self, slot: int, pool: Pool, server: int, demand: Units) -> float:
        """Return the sum over resources of L (U / L) ** (used / capacity) x demand, in pool fractions."""
        low = self.prices.low[pool.role]
        price = 0.0
        for r, (need, have) in enumerate(zip(demand, self.free(slot, pool, server), strict=True)):
            capacity = pool.nodes[server].resources.get(NODE_RESOURCES[r], len(pool.nodes[server].gpus))
            total = sum(node.resources.get(NODE_RESOURCES[r], len(node.gpus)) for node in pool.nodes)
            if need > 0 and total > 0:
                used = (capacity - have) / capacity if capacity else 1.0
                price += need / total * low * (self.prices.high[pool.role][r] / low) ** used
        return price
