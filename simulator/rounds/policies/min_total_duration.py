"""Minimum total duration (Narayanan et al., Gavel, OSDI 2020), OSSP in Shockwave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve, shares

TOLERANCE = 1.05
"""Ratio of the bounds of the duration at which the search ends."""

RANGES_S = ((100.0, 1e6), *((10.0**power, 10.0 ** (power + 1)) for power in range(6, 16)))
"""Ranges of durations searched one after the other, in seconds."""


def min_total_duration(jobs: Sequence[Job], gpus: float, solve: Solve) -> Any:
    """Return shares under which all jobs end within the shortest time for which there are such shares."""
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
