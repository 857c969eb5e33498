"""Tiresias (Gu et al., NSDI 2019) as compared with in Pollux: two queues of least attained service."""

from __future__ import annotations

from collections.abc import Sequence

from resource_manager.scheduling.queue.orders import FIRST_QUEUE_GPU_S
from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve
from simulator.rounds.policies.base import Choice


class Tiresias:
    """Jobs with little attained service first; one with more goes to the end of the second queue for good."""

    def __init__(self, solve: Solve) -> None:
        self._queues: tuple[dict[Job, None], dict[Job, None]] = ({}, {})
        self._executed_s: dict[Job, float] = {}

    def arrived(self, job: Job) -> None:
        self._queues[0][job] = None
        self._executed_s[job] = 0.0

    def ran(self, job: Job, seconds: float) -> None:
        self._executed_s[job] += seconds
        first, second = self._queues
        if job in first and self._executed_s[job] * job.gpus >= FIRST_QUEUE_GPU_S:
            del first[job]
            second[job] = None

    def left(self, job: Job) -> None:
        del self._executed_s[job]
        for queue in self._queues:
            queue.pop(job, None)

    def rank(self, jobs: Sequence[Job], gpus: float, now: float) -> list[Choice]:
        able = set(jobs)
        return [Choice(job, job.gpus) for queue in self._queues for job in queue if job in able]
