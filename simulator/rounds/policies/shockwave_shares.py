"""Shares of time as Shockwave (Zheng et al., NSDI 2023) compares with: Gandiva-Fair's, and three of Gavel's.

Gandiva-Fair: Chaudhary et al., EuroSys 2020; Gavel: Narayanan et al., OSDI 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve, shares

TOLERANCE = 1.05
"""Ratio of the bounds of the duration at which the search ends."""

RANGES_S = ((100.0, 1e6), *((10.0**power, 10.0 ** (power + 1)) for power in range(6, 16)))
"""Ranges of durations searched one after the other, in seconds."""


def gandiva_fair(jobs: Sequence[Job], gpus: float, solve: Solve) -> list[float]:
    """Return the same share for every job, however many GPUs it asks for."""
    fair = gpus / len(jobs)
    return [fair / max(fair, 1)] * len(jobs)


def max_min_fairness(jobs: Sequence[Job], gpus: float, solve: Solve) -> Any:
    """Return shares that maximise the least GPU time of a job; throughputs play no part."""
    import numpy as np

    sizes = np.array([job.gpus for job in jobs], float)
    objective = np.zeros(len(jobs) + 1)
    objective[0] = 1.0
    # A job without GPUs is not to make the least time 0: it counts as if it asked for as many as the largest.
    counted = np.where(sizes > 0, sizes, sizes.max() or 1.0)
    least = np.hstack([-np.ones((len(jobs), 1)), -np.diag(counted)])
    return shares(objective, sizes, gpus, solve, before=(least, np.zeros(len(jobs))))


def max_sum_throughput(jobs: Sequence[Job], gpus: float, solve: Solve) -> Any:
    """Return shares that maximise the sum of steps a second over all jobs, not normalised."""
    import numpy as np

    sizes = np.array([job.gpus for job in jobs], float)
    return shares(-np.array([job.rate for job in jobs]), sizes, gpus, solve)


def min_total_duration(jobs: Sequence[Job], gpus: float, solve: Solve) -> Any:
    """Return shares under which all jobs end within the shortest time for which there are such shares.

    The policy is called OSSP in Shockwave.
    """
    import numpy as np

    sizes = np.array([job.gpus for job in jobs], float)
    rates = np.array([job.rate for job in jobs])
    left = np.array([job.steps_left for job in jobs], float)
    for low, high in RANGES_S:
        best = None
        while TOLERANCE * low < high:
            duration_s = (low + high) / 2
            needed = (-np.diag(rates), -left / duration_s)
            found = shares(np.zeros(len(jobs)), sizes, gpus, solve, after=needed)
            if found is None:
                low = duration_s
            else:
                best, high = found, duration_s
        if best is not None:
            return best
    return np.zeros(len(jobs))
