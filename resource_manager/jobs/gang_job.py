"""Jobs of all members of a lease: prepared on all, then started on all, and ended together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import (
    Job,
    JobState,
    JobStatus,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
    NoAnswerError,
)
from resource_manager.jobs.running_job import RunningJob

MAX_AT_ONCE = 16
"""Servers that are asked at the same time."""

ORDER_LABEL = "startup_order"
"""Label of a lease with its `StartupOrder`, if it is not the default."""

T = TypeVar("T")

_silent: ContextVar[dict[tuple[str, str, str], str]] = ContextVar("silent")
"""Launcher, address and connection of places that gave no answer, and why, where they are asked once."""


class StartupOrder(StrEnum):
    """Order of the starts: rank 0 and then the others, or all others before rank 0, which needs them."""

    TOGETHER = "together"
    WORKERS_FIRST = "workers_first"


class DoneWhen(StrEnum):
    """Condition of success: all members ended with exit code 0, or rank 0 did; then the others are ended."""

    ALL = "all"
    RANK0 = "rank0"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Places at which the jobs can be started, by rank, and why not on the other servers."""

    places: tuple[JobPlace, ...]
    failed: Mapping[str, LauncherError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Ranks whose jobs are gone, how many of them ran, and why the others may still run, by rank."""

    ranks: tuple[int, ...]
    ran: int
    left: Mapping[int, LauncherError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preempted:
    """Statuses by rank after the jobs were told, and why it is unknown for the others."""

    statuses: Mapping[int, JobStatus]
    left: Mapping[int, LauncherError] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Return True if all members are known to have ended."""
        return not self.left and JobState.RUNNING not in (each.state for each in self.statuses.values())

    @property
    def has_succeeded(self) -> bool:
        """Return True if all members ended with exit code 0."""
        return self.is_over and all(status.exit_code == 0 for status in self.statuses.values())

    @property
    def has_failed(self) -> bool:
        """Return True if a member had failed by itself, before it was told."""
        return any(
            status.state is JobState.FINISHED and status.exit_code != 0 and not status.preempted
            for status in self.statuses.values()
        )


@dataclass(frozen=True, slots=True)
class GangJob:
    """Jobs of the members of a lease, in the order of their ranks; one for a lease of one server."""

    jobs: tuple[RunningJob, ...]
    order: StartupOrder = StartupOrder.TOGETHER

    @classmethod
    def of(cls, allocation: Mapping[str, Any]) -> GangJob | None:
        """Return the placed jobs of an allocation, or None if no job was placed."""
        jobs = RunningJob.all_of(allocation)
        return cls(jobs, order_of(allocation["labels"])) if jobs else None

    @classmethod
    def planned(cls, allocation: Mapping[str, Any], launcher: str, conn_id: str | None) -> GangJob:
        """Return the jobs of an allocation as they are about to be placed by this launcher."""
        return cls(RunningJob.planned(allocation, launcher, conn_id), order_of(allocation["labels"]))

    def prepare(self, wanted: Sequence[Job]) -> Prepared:
        """Make ready what the starts need, and start nothing."""
        by_key = {job.key: job for job in wanted}
        places, errors = self._try_each(self.jobs, lambda launcher, job: launcher.prepare(by_key[job.key]))
        failed = {job.server: errors[job.rank] for job in self.jobs if job.rank in errors}
        return Prepared(tuple(places[rank] for rank in sorted(places)), failed)

    def start(self, wanted: Sequence[Job]) -> bool:
        """Start the members that do not run yet, in two phases if there are several; return if any began.

        None is started if one failed before. Raises `LauncherError`, which names the server,
        `LauncherUnreachableError` where a member may run, `AlreadyEndedError` if one was stopped before.
        """
        if len(self.jobs) > 1:
            statuses = self._each(self.jobs, lambda launcher, job: launcher.status(job.key)).values()
            if any(status.state is JobState.FINISHED and status.exit_code != 0 for status in statuses):
                return False
        by_key = {job.key: job for job in wanted}
        began: list[bool] = []
        for phase in self._in_order(self.jobs):
            began += self._each(phase, lambda launcher, job: launcher.start(by_key[job.key])).values()
        return any(began)

    def is_absent(self) -> bool:
        """Return True if no member has a job yet; raises as `start` does."""
        statuses = self._each(self.jobs, lambda launcher, job: launcher.status(job.key))
        return all(status.state is JobState.ABSENT for status in statuses.values())

    def is_running(self) -> bool:
        """Return True if a member runs; raises `LauncherError` if that is unknown of one and none does."""
        statuses, left = self._try_each(self.jobs, lambda launcher, job: launcher.status(job.key))
        if any(status.state is JobState.RUNNING for status in statuses.values()):
            return True
        for error in left.values():
            raise error
        return False

    def is_gone(self) -> bool:
        """Return True if no process of any member is left; raises `LauncherError` if that is unknown."""

        def is_left(launcher: Launcher, job: RunningJob) -> bool:
            return launcher.status(job.key).state is JobState.RUNNING or job.key in launcher.running()

        return not any(self._each(self.jobs, is_left).values())

    def stop(self, grace_s: float = 10.0) -> Stopped:
        """End all members at once and then remove them, those first that are started first."""
        ran: set[int] = set()
        left: dict[int, LauncherError] = {}

        def end(launcher: Launcher, job: RunningJob) -> None:
            if launcher.status(job.key).state is JobState.RUNNING:
                ran.add(job.rank)
            launcher.terminate(job.key, grace_s)

        def remove(launcher: Launcher, job: RunningJob) -> None:
            if launcher.stop(job.key, grace_s):
                ran.add(job.rank)

        if len(self.jobs) > 1:
            _, left = self._try_each(self.jobs, end)
        for phase in self._in_order([job for job in self.jobs if job.rank not in left]):
            left |= self._try_each(phase, remove)[1]
        gone = tuple(job.rank for job in self.jobs if job.rank not in left)
        return Stopped(gone, len(ran), dict(sorted(left.items())))

    def preempt(self, grace_s: float, signal_name: str, wait_s: float) -> Preempted:
        """Tell all members at once that their lease is taken; return once they have ended, or after `wait_s`.

        It may be called again, from any process, until all have ended.
        """
        statuses, left = self._try_each(
            self.jobs, lambda launcher, job: launcher.preempt(job.key, grace_s, signal_name, wait_s)
        )
        return Preempted(statuses, dict(sorted(left.items())))

    def tail(self) -> str:
        """Return the end of the output of rank 0; empty if it cannot be read."""
        tails, _ = self._try_each(self.jobs[:1], lambda launcher, job: launcher.tail(job.key))
        return next(iter(tails.values()), "")

    def _in_order(self, jobs: Sequence[RunningJob]) -> list[list[RunningJob]]:
        first = [job for job in jobs if job.rank == 0]
        others = [job for job in jobs if job.rank != 0]
        return [first, others] if self.order is StartupOrder.TOGETHER else [others, first]

    def _each(self, jobs: Sequence[RunningJob], act: Callable[[Launcher, RunningJob], T]) -> dict[int, T]:
        """Return the answer for each of the jobs by rank; raises the first error, the worst kind first."""
        answers, errors = self._try_each(jobs, act)
        for error in sorted(errors.values(), key=lambda each: not isinstance(each, LauncherUnreachableError)):
            raise error
        return answers

    def _try_each(
        self, jobs: Sequence[RunningJob], act: Callable[[Launcher, RunningJob], T]
    ) -> tuple[dict[int, T], dict[int, LauncherError]]:
        """Return the answers and the errors by rank; each job has a connection of its own."""

        silent = _silent.get({})

        def one(job: RunningJob) -> T | LauncherError:
            place = (job.place.launcher, job.place.address, job.place.conn_id)
            try:
                if place in silent:
                    raise NoAnswerError(silent[place])
                with closing(job.open()) as launcher:
                    return act(launcher, job)
            except LauncherError as error:
                if isinstance(error, NoAnswerError):
                    silent[place] = str(error)
                error.server = job.server
                if len(self.jobs) == 1:
                    return error
                named = type(error)(f"rank {job.rank} on {job.server}: {error}")
                named.__cause__, named.server = error, job.server
                return named

        if len(jobs) == 1:  # no thread for the job of one server
            found = [one(jobs[0])]
        else:
            size = max(1, min(len(jobs), MAX_AT_ONCE))
            with ThreadPoolExecutor(size, initializer=_start_of_threads()) as pool:
                calls = [pool.submit(copy_context().run, one, job) for job in jobs]
                found = [call.result() for call in calls]
        by_rank = dict(zip((job.rank for job in jobs), found, strict=True))
        return (
            {rank: answer for rank, answer in by_rank.items() if not isinstance(answer, LauncherError)},
            {rank: answer for rank, answer in by_rank.items() if isinstance(answer, LauncherError)},
        )


@contextmanager
def asking_silent_places_once() -> Iterator[None]:
    """Ask a place that gave no answer nothing more inside: other questions would wait as long in vain."""
    before = _silent.set({})
    try:
        yield
    finally:
        _silent.reset(before)


def _start_of_threads() -> Callable[[], None] | None:
    """Return what a thread calls first so that it may ask Airflow as this one does; None outside Airflow."""
    if "resource_manager.airflow.version_compat" not in sys.modules:  # in a trigger it is there
        return None
    from resource_manager.airflow.version_compat import of_same_loop

    return of_same_loop()


def order_of(labels: Mapping[str, str]) -> StartupOrder:
    """Return the order in which the members of a lease with these labels start."""
    workers_first = labels.get(ORDER_LABEL) == StartupOrder.WORKERS_FIRST
    return StartupOrder.WORKERS_FIRST if workers_first else StartupOrder.TOGETHER
