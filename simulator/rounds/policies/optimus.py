"""Optimus (Peng et al., EuroSys 2018) as compared with in Pollux: GPUs where they save the most time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve
from simulator.rounds.policies.base import Choice, RoundPolicy


class Optimus(RoundPolicy):
    """One GPU for each job in order of arrival, then each further one to the job of the largest gain.

    The gain is the time that one more GPU saves over the job's remaining steps; both are known exactly.
    """

    resizes = True

    def __init__(self, solve: Solve) -> None:
        pass

    def rank(self, jobs: Sequence[Job], gpus: float, now: float) -> list[Choice]:
        served = jobs[: int(gpus)]
        counts = [1] * len(served)
        left = int(gpus) - len(served)
        remaining = [job.steps_left for job in served]
        gains = [(-gain(job, 1, remaining[place]), place) for place, job in enumerate(served)]
        heapify(gains)
        while left and gains and gains[0][0] < 0:
            place = gains[0][1]
            counts[place] += 1
            left -= 1
            heapreplace(gains, (-gain(served[place], counts[place], remaining[place]), place))
        chosen = [Choice(job, count) for job, count in zip(served, counts, strict=True)]
        return sorted(chosen, key=lambda choice: choice.gpus)


def gain(job: Job, gpus: int, steps_left: float) -> float:
    """Return the seconds that one GPU more than `gpus` saves; negative if it slows the job down."""
    if gpus + 1 > job.max_gpus:
        return 0.0
    return (job.step_s(gpus) - job.step_s(gpus + 1)) * steps_left
