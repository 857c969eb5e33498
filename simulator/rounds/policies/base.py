"""Interface of round policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from simulator.rounds.job import Job


class Choice(NamedTuple):
    """A job and the number of GPUs it is to have; without `runs` they stay idle for it."""

    job: Job
    gpus: float
    runs: bool = True


class RoundPolicy(Protocol):
    """Decision, before each round, which jobs run on how many GPUs; one object serves one replay.

    One that gives jobs other numbers of GPUs than they ask for has an attribute `resizes` that is True: it is
    refused at once where a workload does not say how fast jobs are on them.
    """

    def arrived(self, job: Job) -> None:
        """Take notice of a new job."""

    def ran(self, job: Job, seconds: float) -> None:
        """Take notice that a job ran for so long; 0 for a round without effect."""

    def left(self, job: Job) -> None:
        """Take notice that a job has ended."""

    def rank(self, jobs: Sequence[Job], gpus: float, now: float) -> list[Choice]:
        """Return what jobs should have in a cluster of `gpus` GPUs, the first served first.

        `jobs` are the active ones in order of arrival. A choice that does not fit the GPUs left by those
        before it is passed over. A job keeps its GPUs if their number stays the same.
        """


def fitting(
    ranked: Sequence[Choice], gpus: float, admits: Callable[[Job], bool] = lambda job: True
) -> list[Choice]:
    """Return the choices that fit in a cluster of so many GPUs and may run, each beside those before it.

    `admits` is called only with the jobs that fit, and counts those of which it returns True.
    """
    chosen = []
    for choice in ranked:
        if choice.gpus <= gpus and admits(choice.job):
            gpus -= choice.gpus
            chosen.append(choice)
    return chosen
