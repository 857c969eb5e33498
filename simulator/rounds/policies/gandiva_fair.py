"""Gandiva-Fair (Chaudhary et al., EuroSys 2020) as compared with in Shockwave: equal shares of time."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve


def gandiva_fair(jobs: Sequence[Job], gpus: float, solve: Solve) -> list[float]:
    """Return the same share for every job, however many GPUs it asks for."""
    fair = gpus / len(jobs)
    return [fair / max(fair, 1)] * len(jobs)
