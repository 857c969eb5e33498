"""Maximum total throughput (Narayanan et al., Gavel, OSDI 2020) as compared with in Shockwave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve, shares


def max_sum_throughput(jobs: Sequence[Job], gpus: float, solve: Solve) -> Any:
    """Return shares that maximise the sum of steps a second over all jobs, not normalised."""
    import numpy as np

    sizes = np.array([job.gpus for job in jobs], float)
    return shares(-np.array([job.rate for job in jobs]), sizes, gpus, solve)
