"""Max-min fairness (Narayanan et al., Gavel, OSDI 2020) as compared with in Shockwave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve, shares


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
