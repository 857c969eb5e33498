"""Rounds of Gavel (Narayanan et al., OSDI 2020) as in Shockwave: each lasts as long as its slowest job.

The order of the operations on floats is the published one; the results depend on their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from simulator.progress import Progress, no_progress
from simulator.rounds.fixed_rounds import count_round
from simulator.rounds.leases import Leases
from simulator.rounds.policies.base import RoundPolicy, fitting
from simulator.rounds.shockwave import ShockwaveJob

ROUND_S = 120
RESTART_S = 20
RESTART_FROM_S = 115
"""A restart costs steps only in rounds longer than this, in seconds."""

MAX_FAILURES = 5
"""Rounds in a row without any effect after which a job ends."""


class GavelRounds:
    """One replay of jobs in order of arrival."""

    def __init__(self, jobs: Sequence[ShockwaveJob], leases: Leases, policy: RoundPolicy) -> None:
        self.jobs = jobs
        self.leases = leases
        self.rounds = 0
        self._number = {job: number for number, job in enumerate(jobs)}
        self._arriving = list(reversed(jobs))
        self._policy = policy
        self._failures = dict.fromkeys(jobs, 0)
        self._running: dict[ShockwaveJob, tuple[int, float]] = {}
        """Job of the round -> (steps, end)."""
        self._keeping: set[ShockwaveJob] = set()
        """Jobs that ran in the round before on the same number of GPUs."""
        self._active: list[ShockwaveJob] = []

    def run(self, progress: Progress = no_progress) -> None:
        """Run the jobs to their ends."""
        total, now = len(self._number), self._arriving[-1].arrival_s
        while self._active or self._arriving:
            begin, now = now, self._end_of_round(now)
            self._end_round(begin)
            for job in self._active:
                job.decide()
            while self._arriving and self._arriving[-1].arrival_s <= now:
                job = self._arriving.pop()
                self._active.append(job)
                self._policy.arrived(job)
            if self._active:
                self._begin_round(now)
            progress(total - len(self._arriving) - len(self._active), total)

    def _end_of_round(self, now: float) -> float:
        if self._running:
            return max(end for _, end in self._running.values())
        if self._active:
            return now + ROUND_S
        return max(now, self._arriving[-1].arrival_s)

    def _end_round(self, begin: float) -> None:
        """Account for what ran since `begin`, the latest end first."""
        running = self._running
        for job in sorted(running, key=lambda job: (-running[job][1], self._number[job])):
            steps, end = running[job]
            took_s = end - begin
            job.record_span(begin, end)
            if self.rounds > 1 and job not in self._keeping and took_s > RESTART_FROM_S:
                steps = floor(steps * ((took_s - RESTART_S) / took_s))
                took_s -= RESTART_S
                job.lost_gpu_s += RESTART_S * job.allocated
            if steps <= 0 and took_s <= 0:
                self._failures[job] += 1
                self._policy.ran(job, 0.0)
            else:
                self._failures[job] = 0
                job.run += steps
                self._policy.ran(job, took_s)
            failures = self._failures[job]
            if failures == MAX_FAILURES or (job.run >= job.total and not failures):
                job.ended_at = end
                self.leases.release(job, end)
                self._policy.left(job)
            else:
                job.adapt()
        self._active = [job for job in self._active if job.ended_at is None]
        self._running = {}

    def _begin_round(self, now: float) -> None:
        gpus = self.leases.gpus
        chosen = fitting(self._policy.rank(self._active, gpus, now), gpus)
        counts = {choice.job: int(choice.gpus) for choice in chosen if choice.runs}
        self._keeping = {job for job in self._active if job.servers and counts.get(job) == job.allocated}
        for job in self._active:
            if job.servers and job not in self._keeping:
                job.preemptions += job not in counts
                self.leases.release(job, now)
        for job in (job for job in self._active if job in counts):
            if not job.servers:
                self.leases.grant(job, counts[job], now)
            rate = job.rate_on(counts[job])
            steps = min(floor(rate * ROUND_S), job.total - job.run)
            self._running[job] = steps, max(now, now + steps / rate)
        self.rounds = count_round(self.rounds)
