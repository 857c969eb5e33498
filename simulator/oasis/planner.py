"""OASiS itself: the best schedule of a job at the current prices, and the decision to accept it.

Algorithms 1 and 2 of Bao et al., INFOCOM 2018, in a fast form that gives the same plans: the dynamic
programme runs forward over worker-slots, so one table serves every end slot, and the cost of any number
of workers in a slot is read off a sorted cumulative sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from simulator.oasis.ledger import Floats, Ints, Ledger, Pool, demand_of
from simulator.oasis.model import TrainingJob
from simulator.oasis.prices import Prices


@dataclass(frozen=True, slots=True)
class Share:
    """That many workers (or PS) of a job on one server in one slot."""

    slot: int
    role: str
    server: int
    count: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A job's placement in every slot; `completion` is its last slot, `cost` its price in total."""

    job: TrainingJob
    shares: tuple[Share, ...]
    completion: int
    cost: float

    @property
    def payoff(self) -> float:
        return self.job.utility_at(self.completion) - self.cost


class Oasis:
    """Algorithm 1: a job whose best schedule has a positive payoff is accepted; its plan is never revised."""

    def __init__(self, ledger: Ledger, prices: Prices) -> None:
        self.ledger = ledger
        self.prices = prices

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        """Return whether the job, new or offered again, is accepted; if so, allocate its plan to the end."""
        schedule = best_schedule(job, slot, self.ledger, self.prices)
        if schedule is None:
            return False
        allocate_shares(self.ledger, job, schedule.shares)
        return True

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        """Do nothing: every slot was allocated on arrival."""


def allocate_shares(ledger: Ledger, job: TrainingJob, shares: Iterable[Share]) -> None:
    """Allocate every share through the ledger's allocator."""
    for share in shares:
        ledger.place(share.slot, job, share.role, share.server, share.count)


def best_schedule(job: TrainingJob, slot: int, ledger: Ledger, prices: Prices) -> Schedule | None:
    """Return the schedule from `slot` on with the largest payoff (Algorithm 2); None if none is above 0."""
    first = max(slot, job.arrival)
    if ledger.slots - first < job.shortest_duration:
        return None
    most = min(job.chunks, job.work)
    workers, servers = (Supply(pool, job, prices, first) for pool in (ledger.worker, ledger.ps))
    ps_for = np.array(job.ps_for[: most + 1])
    cost = workers.cost(most) + servers.cost(int(ps_for[-1]))[:, ps_for]
    best = cheapest_worker_slots(job, first, cost)
    if best is None:
        return None
    counts, total = best
    shares: list[Share] = []
    for offset, count in enumerate(counts):
        if count:
            shares += workers.cheapest(offset, count)
            shares += servers.cheapest(offset, job.ps_for[count])
    return Schedule(job, tuple(shares), first + len(counts) - 1, total)


class Supply:
    """Servers of one role by price, slot by slot: the cost of one more worker (or PS), and how many fit.

    `price` and `fit` are slots x servers; the first row is slot `first_slot`.
    """

    def __init__(self, pool: Pool, job: TrainingJob, prices: Prices, first_slot: int) -> None:
        price, fit = prices.unit_price(pool, demand_of(job, pool.role), first_slot), pool.fit(job, first_slot)
        self.role = pool.role
        self.first_slot = first_slot
        self.order = np.argsort(price, axis=1, kind="stable")
        self.price = np.take_along_axis(price, self.order, axis=1)
        self.fit = np.take_along_axis(fit, self.order, axis=1)

    def cost(self, most: int) -> Floats:
        """Return COST_t for every count at once: slots x (most + 1), infinite where so many do not fit."""
        slots, servers = self.price.shape
        fit = np.minimum(self.fit, most)
        filled = np.zeros((slots, servers + 1), dtype=np.int64)
        np.cumsum(fit, axis=1, out=filled[:, 1:])
        paid = np.zeros((slots, servers + 1))
        np.cumsum(fit * self.price, axis=1, out=paid[:, 1:])
        # One search for all slots: each slot's counts are shifted into a range of their own.
        apart = np.arange(slots)[:, np.newaxis] * (servers * most + most + 1)
        wanted = np.arange(most + 1)
        found = np.searchsorted((filled[:, 1:] + apart).ravel(), (wanted + apart).ravel())
        last = found.reshape(slots, most + 1) - np.arange(slots)[:, np.newaxis] * servers
        rows = np.arange(slots)[:, np.newaxis]
        price = np.pad(self.price, ((0, 0), (0, 1)), constant_values=np.inf)
        cost: Floats = paid[rows, last]
        some = wanted > filled[rows, last]
        np.add(cost, (wanted - filled[rows, last]) * price[rows, last], out=cost, where=some)
        return cost

    def cheapest(self, offset: int, count: int) -> list[Share]:
        """Return that many workers (or PS), on the cheapest servers of the slot at that row."""
        shares: list[Share] = []
        for server, fit in zip(self.order[offset].tolist(), self.fit[offset].tolist(), strict=True):
            if not count:
                break
            taken = min(fit, count)
            if taken:
                shares.append(Share(self.first_slot + offset, self.role, server, taken))
                count -= taken
        return shares


def cheapest_worker_slots(job: TrainingJob, first: int, cost: Floats) -> tuple[list[int], float] | None:
    """Return workers a slot, up to the end slot with the largest payoff, and their cost; None if none pays.

    `cost` is slots x workers. DP_COST(t, work) = min over d of COST_t(d) + DP_COST(t - 1, work - d), built
    forward; it stops where even a schedule at no cost would not pay more than the best end slot so far.
    """
    most = cost.shape[1] - 1
    table = np.full(most + job.work + 1, np.inf)  # entry most + w: w worker-slots done; below: impossible
    table[most] = 0.0
    reached = 0
    choices: list[Ints] = []
    best_payoff, best_end, best_cost = 0.0, -1, 0.0
    for offset in range(len(cost)):
        utility = job.utility_at(first + offset)
        if utility <= best_payoff:
            break
        row = cost[offset]
        limit = int(np.searchsorted(row, np.inf)) - 1
        reached = min(job.work, reached + limit)
        before = sliding_window_view(table[most - limit : most + reached + 1], limit + 1)[:, ::-1]
        options = before + row[: limit + 1]
        choice = options.argmin(axis=1)
        table[most : most + reached + 1] = options[np.arange(reached + 1), choice]
        choices.append(choice)
        if reached == job.work and utility - table[-1] > best_payoff:
            best_payoff, best_end, best_cost = float(utility - table[-1]), offset, float(table[-1])
    if best_end < 0:
        return None
    counts = [0] * (best_end + 1)
    left = job.work
    for offset in range(best_end, -1, -1):
        counts[offset] = int(choices[offset][left])
        left -= counts[offset]
    return counts, best_cost
