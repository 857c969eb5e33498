"""Finish-time fairness (Mahajan et al., Themis, NSDI 2020): completion time relative to an equal share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from resource_manager.core.models import MILLI_PER_GPU
from simulator.replay.job_runs import Record

UNFAIR_ABOVE = 1.05
"""Ratio above which a job counts as treated unfairly."""


def finish_time_fairness(jct_s: float, exclusive_s: float, jobs: int, gpus: float) -> float:
    """Return the completion time relative to an equal share of the cluster among all jobs.

    `exclusive_s` is what the job takes alone; with more jobs than GPUs an equal share is so much slower.
    """
    return round(jct_s / (exclusive_s * max(1, jobs / gpus)), 5)


def unfair_percent(ratios: Sequence[float]) -> float:
    """Return the percentage of jobs above `UNFAIR_ABOVE`."""
    return round(100 * (sum(ratio > UNFAIR_ABOVE for ratio in ratios) / len(ratios)), 2)


def fairness(record: Record) -> dict[str, float]:
    """Return the finish-time fairness of each job that ended and whose run time is known."""
    gpus = max((sample.gpu_milli for sample in record.samples), default=0) / MILLI_PER_GPU
    if not gpus:
        return {}
    jobs = len(record.job_runs)
    return {
        name: finish_time_fairness(run.ended_at - run.job.submitted_at, run.job.runtime_s, jobs, gpus)
        for name, run in record.job_runs.items()
        if run.ended_at is not None and 0 < run.job.runtime_s < math.inf
    }


def fairness_figures(record: Record) -> dict[str, Any]:
    """Return the worst ratio and the percentage of jobs treated unfairly."""
    ratios = list(fairness(record).values())
    return {
        "worst_ftf": max(ratios, default=None),
        "unfair_percent": unfair_percent(ratios) if ratios else None,
    }
