"""Simulation of one instance under one algorithm, slot by slot; the leases that ran give the utility."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from resource_manager.core.models import Lease
from simulator.engine import EventQueue
from simulator.errors import SimulationError
from simulator.oasis.ledger import WORKER, Ledger, count_of, role_of
from simulator.oasis.model import BANDWIDTH, Instance, TrainingJob

OnSlot = Callable[[int, Ledger], object]


class Scheduler(Protocol):
    """Scheduler of an algorithm; it allocates on the ledger and nowhere else."""

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        """Return whether the job is accepted, in the slot of its arrival or when it is offered again."""

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        """Allocate the slot for accepted jobs; `remaining` is their work left, in worker-slots, by job id."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job: the slot it finished in, if it did, and its utility."""

    job: TrainingJob
    accepted: bool
    completion: int | None
    utility: float

    @property
    def target_gap(self) -> float | None:
        """Slots later than the target duration (below 0: earlier); None if it never finished."""
        return None if self.completion is None else self.completion - self.job.arrival + 1 - self.job.target


@dataclass(frozen=True, slots=True)
class InstanceRun:
    """The outcome of every job, in order of the instance, and the processor time of each decision."""

    outcomes: tuple[JobResult, ...]
    decision_s: tuple[float, ...]

    @property
    def utility(self) -> float:
        return math.fsum(outcome.utility for outcome in self.outcomes)

    @property
    def accepted(self) -> int:
        return sum(outcome.accepted for outcome in self.outcomes)

    @property
    def completed(self) -> int:
        return sum(outcome.completion is not None for outcome in self.outcomes)


def run(
    instance: Instance,
    scheduler_on: Callable[[Ledger], Scheduler],
    *,
    reoffer_after: int = 0,
    on_slot: OnSlot | None = None,
) -> InstanceRun:
    """Return the run of the instance; `decision_s` is the scheduler's processor time per job, in seconds.

    A job that could not finish even alone is refused at once. With `reoffer_after`, a refused job is offered
    again every that many slots. `on_slot` receives the ledger of a slot just before it ends.
    Raises `SimulationError` if the leases break a constraint of the model.
    """
    ledger = Ledger(instance)
    scheduler = scheduler_on(ledger)
    offers: EventQueue[TrainingJob] = EventQueue()
    for job in instance.jobs:
        if job.arrival + job.shortest_duration <= instance.slots:
            offers.schedule(job.arrival, job)
    remaining: dict[str, int] = {}
    jobs = {job.job_id: job for job in instance.jobs}
    accepted: set[str] = set()
    completion: dict[str, int] = {}
    arriving_s: list[float] = []
    booking_s = 0.0
    for slot in range(instance.slots):
        for job in offers.pop_due(slot):
            started = time.process_time()
            taken = scheduler.arrive(job, slot)
            arriving_s.append(time.process_time() - started)
            if taken:
                remaining[job.job_id] = job.work
                accepted.add(job.job_id)
            elif reoffer_after:
                offers.schedule(slot + reoffer_after, job)
        started = time.process_time()
        scheduler.begin_slot(slot, remaining)
        booking_s += time.process_time() - started
        if on_slot is not None:
            on_slot(slot, ledger)
        for job_id, workers in work_done(jobs, slot, ledger.end_slot(slot)).items():
            left = remaining.get(job_id, 0) - workers
            remaining[job_id] = left
            if left <= 0:
                completion.setdefault(job_id, slot)
                del remaining[job_id]
    share_s = booking_s / max(1, len(arriving_s))
    return InstanceRun(
        tuple(
            JobResult(
                job,
                job.job_id in accepted,
                completion.get(job.job_id),
                job.utility_at(completion[job.job_id]) if job.job_id in completion else 0.0,
            )
            for job in instance.jobs
        ),
        tuple(spent + share_s for spent in arriving_s),
    )


def work_done(jobs: Mapping[str, TrainingJob], slot: int, leases: Iterable[Lease]) -> dict[str, int]:
    """Return the workers that ran, by job; raise `SimulationError` if a constraint of the model is broken."""
    workers: dict[str, int] = defaultdict(int)
    servers: dict[str, int] = defaultdict(int)
    for lease in leases:
        (workers if role_of(lease) == WORKER else servers)[lease.request.owner] += count_of(lease)
    for job_id in {*workers, *servers}:
        refuse_broken_job(slot, jobs[job_id], workers[job_id], servers[job_id])
    return dict(workers)


def refuse_broken_job(slot: int, job: TrainingJob, workers: int, servers: int) -> None:
    sent, taken = workers * job.worker_units[BANDWIDTH], servers * job.ps_units[BANDWIDTH]
    for broken, rule in (
        (slot < job.arrival, f"runs before it arrives in slot {job.arrival}"),
        (workers > job.chunks, f"has {workers} workers for {job.chunks} chunks"),
        (servers > workers, f"has {servers} PS for {workers} workers"),
        (sent > taken, f"sends {sent / 10**6:g} Gb/s to PS that take {taken / 10**6:g}"),
    ):
        if broken:
            raise SimulationError(f"slot {slot}: job {job.job_id!r} {rule}")
