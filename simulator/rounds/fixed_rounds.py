"""Rounds of equal length, as in Pollux (Qiao et al., OSDI 2021): run for a minute, plan, place."""

from __future__ import annotations

import math
from collections.abc import Sequence

from resource_manager.core.changes import Cancelled, Change
from simulator.errors import SimulationError
from simulator.progress import Progress, no_progress
from simulator.rounds.job import Job, RunningJob
from simulator.rounds.leases import Leases
from simulator.rounds.policies.base import RoundPolicy, fitting

ROUND_S = 60
RESTART_S = 30
"""Seconds for which a job that was placed again holds its GPUs and makes no progress."""

MAX_ROUNDS = 2_000_000
"""Rounds after which a replay gives up, nearly four years of minutes."""

MAX_IDLE_ROUNDS = 60
"""Rounds without a running job and without events to come after which no other job starts.

They count once maintenance windows let one of the jobs start.
"""


def count_round(rounds: int) -> int:
    """Return one round more; raise `SimulationError` where a workload needs too many."""
    if rounds == MAX_ROUNDS:
        raise SimulationError(f"not all jobs ended within {MAX_ROUNDS:,} rounds: a job runs for too long")
    return rounds + 1


class FixedRounds:
    """One replay of jobs in the order given; `external` are cancellations and changes of servers, by time.

    Between rounds every job may be preempted, resized or moved.
    """

    def __init__(
        self, jobs: Sequence[RunningJob], leases: Leases, policy: RoundPolicy, external: Sequence[Change] = ()
    ) -> None:
        self.jobs = jobs
        self.leases = leases
        self.rounds = 0
        self._number = {job: number for number, job in enumerate(jobs)}
        self._arriving = sorted(jobs, key=lambda job: job.arrival_s, reverse=True)
        self._external = sorted(external, key=lambda change: change.at)[::-1]
        self._policy = policy
        self._restart_s: dict[Job, int] = {}
        self._active: list[RunningJob] = []

    def run(self, progress: Progress = no_progress) -> None:
        """Run the jobs to their ends."""
        now, idle, total = 0, 0, len(self.jobs)
        opens_at: float | None = None
        while (self._arriving or self._active) and idle < MAX_IDLE_ROUNDS:
            begin, now = now, self._next_round(now)
            self._advance(begin, now)
            self._change(now)
            self._arrive(now)
            if self._active:
                self._place(now)
                self.rounds = count_round(self.rounds)
            if self._arriving or self._external or any(job.servers for job in self._active):
                idle, opens_at = 0, None
            else:
                opens_at = self.leases.opens_at(self._active, now) if opens_at is None else opens_at
                idle += now >= opens_at
            progress(total - len(self._arriving) - len(self._active), total)

    def _next_round(self, now: int) -> int:
        """Return the end of the round; rounds without a job are skipped."""
        if self._active:
            return now + ROUND_S
        return max(now + ROUND_S, math.ceil(self._arriving[-1].arrival_s / ROUND_S) * ROUND_S)

    def _advance(self, begin: int, end: int) -> None:
        ran = [job for job in self._active if job.servers]
        for job in ran:
            pause = self._restart_s.pop(job, 0)
            job.lost_gpu_s += pause * job.allocated
            used = job.advance(end - begin - pause)
            if used is not None:
                job.ended_at = begin + pause + used
            job.record_span(begin, end if job.ended_at is None else job.ended_at)
            self._policy.ran(job, end - begin)
            if job.ended_at is not None:
                self._leave(job, end)

    def _leave(self, job: RunningJob, now: float) -> None:
        self._policy.left(job)
        self._active.remove(job)
        self._restart_s.pop(job, None)
        if job.servers:
            self.leases.release(job, now)

    def _change(self, now: int) -> None:
        """Make the external changes that are due."""
        while self._external and self._external[-1].at <= now:
            change = self._external.pop()
            if not isinstance(change, Cancelled):
                self.leases.apply(change, now)
                continue
            for job in [job for job in self._arriving if job.name == change.lease_id]:
                self._arriving.remove(job)
                job.cancelled_at = change.at
            for job in [job for job in self._active if job.name == change.lease_id]:
                self._leave(job, now)
                job.cancelled_at = now

    def _arrive(self, now: int) -> None:
        came = []
        while self._arriving and self._arriving[-1].arrival_s <= now:
            came.append(self._arriving.pop())
        if came:
            came.sort(key=self._number.__getitem__)
            for job in came:
                self._policy.arrived(job)
            self._active = sorted([*self._active, *came], key=self._number.__getitem__)

    def _place(self, now: int) -> None:
        """Give each job what the policy says: first release what is lost, then place what is new."""
        gpus = self.leases.gpus
        able = [job for job in self._active if self.leases.could_fit(job)]
        chosen = fitting(self._policy.rank(able, gpus, now), gpus, self.leases.admission(now)) if able else []
        counts = {job: count for job, count, runs in chosen if runs}
        for job in self._active:
            if job.servers and counts.get(job) != job.allocated:
                job.preemptions += job not in counts
                self.leases.release(job, now)
        for waiting, count in counts.items():
            if not waiting.servers and self.leases.grant(waiting, count, now):
                self._restart_s[waiting] = RESTART_S
