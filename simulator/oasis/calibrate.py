"""Calibration of the free parameters of the prices, utility floor and eta, on training instances."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.oasis.model import Instance, TrainingJob
from simulator.oasis.planner import Oasis
from simulator.oasis.prices import OUTLIERS, fit_prices, safe_eta
from simulator.oasis.simulation import run
from simulator.progress import Progress, no_progress

FLOORS = (0.01, 0.1, 0.5, 1.0)
ETA_FACTORS = tuple(10 ** (-step / 2) for step in range(17))
"""Multiples tried of the eta that the proof requires: from 1 down to a hundred-millionth."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The parameters chosen, and the fraction of the upper bound that the utility reached in training."""

    utility_floor: float
    eta: float
    share: float


def share_gained(
    instance: Instance, history: Sequence[TrainingJob], utility_floor: float, eta: float
) -> float:
    """Return OASiS's utility as a fraction of the total if each job had the cluster to itself."""
    prices = fit_prices(history, instance, utility_floor, eta, OUTLIERS)
    utility = run(instance, lambda ledger: Oasis(ledger, prices)).utility
    bound = sum(job.utility(job.shortest_duration) for job in instance.jobs)
    return utility / bound if bound else 1.0  # jobs that end too late to be worth anything lose nothing


def calibrate(
    training: Sequence[tuple[Instance, Sequence[TrainingJob]]], progress: Progress = no_progress
) -> Calibration:
    """Return the floor and eta under which OASiS loses least on the training pairs (instance, history).

    Loss is the mean of upper bound / utility; the bound is the utility of every job finished in its shortest
    duration. The offline optimum, which would take minutes, is not needed.
    """
    start = max(safe_eta(history, instance, OUTLIERS) for instance, history in training)
    tried: list[tuple[float, Calibration]] = []
    for floor in FLOORS:
        for factor in ETA_FACTORS:
            shares = [share_gained(*pair, floor, factor * start) for pair in training]
            loss = statistics.fmean(1 / max(share, 1e-9) for share in shares)
            tried.append((loss, Calibration(floor, factor * start, statistics.fmean(shares))))
            progress(len(tried), len(FLOORS) * len(ETA_FACTORS))
    return min(tried, key=lambda each: each[0])[1]
