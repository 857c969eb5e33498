"""Prices of resources that grow exponentially with use (Bao et al., INFOCOM 2018, section IV)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.errors import InputError
from simulator.oasis.ledger import PS, WORKER, Floats, Pool
from simulator.oasis.model import RESOURCES, Amounts, Instance, TrainingJob, Units

UTILITY_FLOOR = 0.5
"""f(T - a) counts as at least this fraction of gamma 1; otherwise one urgent job makes all prices near 0."""

ETA = 0.5
"""With this divisor, the first prices of workers and PS add up to no more than the least valuable job brings.

The proof of the competitive ratio requires far more (`safe_eta`), which makes first prices almost 0 and
wastes most of their range: early jobs take as much as they can use.
"""

OUTLIERS = 0.05
"""Fraction of a history left out at either end: its extremes lie further out than those of the few jobs to
come, and the more so the longer the history."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The price functions of the worker servers (L1, U1) and of the PS servers (L2, U2).

    A price is utility per unit of resource and slot, the unit being the pool's whole capacity, so that
    gigabytes and GPUs add up; `low` is the price when nothing is used, `high[r]` when all of r is.
    """

    low: dict[str, float]
    high: dict[str, Amounts]

    def __post_init__(self) -> None:
        for role, low in self.low.items():
            high = max(self.high[role])
            if not (low > 0 and high / low < math.inf):
                raise InputError(
                    f"prices of a {role} from {low:g} to {high:g} are out of range: eta, --misestimate"
                    " or a value of the jobs is too extreme"
                )

    def unit_price(self, pool: Pool, demand: Units, first_slot: int) -> Floats:
        """Return the price of one worker (or PS) on each server, slots from `first_slot` x servers."""
        low, high = self.low[pool.role], self.high[pool.role]
        price: Floats = np.zeros(pool.free.shape[:-1])[first_slot:]
        for r, amount in enumerate(demand):
            if amount > 0 and pool.total[r] > 0:
                share = amount / pool.total[r]
                free, capacity = pool.free[first_slot:, :, r], pool.capacity[:, r]
                # A server that has none of the resource counts as full.
                used = 1.0 - np.divide(free, capacity, out=np.zeros_like(free), where=capacity > 0)
                price += share * low * np.exp(math.log(high[r] / low) * used)
        return price

    @property
    def alpha(self) -> float:
        """Half the competitive ratio (paper, theorem 4)."""
        return max(1.0, *(math.log(high / self.low[role]) for role in self.high for high in self.high[role]))

    def scaled(self, low: float = 1.0, high: float = 1.0) -> Prices:
        """Return the same functions with misestimated ends; `low` stays below `high`."""
        scaled_high = {role: tuple(high * value for value in values) for role, values in self.high.items()}
        return replace(
            self,
            high=scaled_high,
            low={role: min(low * value, *scaled_high[role]) for role, value in self.low.items()},
        )


def fit_prices(
    history: Sequence[TrainingJob],
    instance: Instance,
    utility_floor: float = UTILITY_FLOOR,
    eta: float | None = ETA,
    outliers: float = 0.0,
) -> Prices:
    """Return the price functions with U and L from earlier jobs (or, clairvoyantly, the very jobs to come).

    `eta` scales L down; None takes the smallest that the proof of the competitive ratio allows, at which
    all capacity at its first price is worth half the least valuable job. `outliers` is the fraction of the
    history to leave out at either end.
    Raises `InputError` for an empty history.
    """
    history = feasible_jobs(history, instance)
    best = np.array([job.utility(job.shortest_duration) for job in history])
    last = np.array(
        [max(job.utility(instance.slots - job.arrival), utility_floor * job.priority) for job in history]
    )
    if eta is None:
        eta = safe_eta(history, instance, outliers)
    low: dict[str, float] = {}
    high: dict[str, Amounts] = {}
    for role in (WORKER, PS):
        share, asked = shares_of(history, instance, role)
        some = asked > 0
        least = np.quantile(last[some] / asked[some], outliers) if some.any() else last.max()
        low[role] = float(least) / (4 * eta)
        gains = np.divide(best[:, np.newaxis], share, out=np.zeros_like(share), where=share > 0)
        ends = np.quantile(gains, 1 - outliers, axis=0)
        # A resource that no job of the history requests is priced like the dearest; no price falls with use.
        ends[ends == 0] = ends.max()
        high[role] = tuple(float(end) for end in np.maximum(ends, low[role]))
    return Prices(low, high)


def safe_eta(history: Sequence[TrainingJob], instance: Instance, outliers: float = 0.0) -> float:
    """Return the smallest eta that the proof of the competitive ratio allows; 1 without any demand."""
    history = feasible_jobs(history, instance)
    return max(
        (
            instance.slots * len(RESOURCES) / float(np.quantile(asked[asked > 0], outliers))
            for _, asked in (shares_of(history, instance, role) for role in (WORKER, PS))
            if asked.any()
        ),
        default=1.0,
    )


def feasible_jobs(history: Sequence[TrainingJob], instance: Instance) -> list[TrainingJob]:
    """Return the jobs that could finish within the slots; raise `InputError` if there is none."""
    found = [job for job in history if job.arrival + job.shortest_duration <= instance.slots]
    if not found:
        raise InputError("prices cannot be estimated: no job of the history fits the slots")
    return found


def shares_of(history: Sequence[TrainingJob], instance: Instance, role: str) -> tuple[Floats, Floats]:
    """Return fractions of all servers per worker (or PS), jobs x resources; their sums times the work."""
    is_worker = role == WORKER
    demands = np.array([job.worker if is_worker else job.ps for job in history], dtype=float)
    servers = np.array(instance.worker_servers if is_worker else instance.ps_servers, dtype=float)
    total = servers.sum(axis=0)
    share: Floats = np.divide(demands, total, out=np.zeros_like(demands), where=total > 0)
    work = np.array([job.work for job in history], dtype=float)
    return share, work * share.sum(axis=1)
