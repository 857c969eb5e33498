"""Shares of time turned into rounds (Narayanan et al., Gavel, OSDI 2020): what is owed most runs first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.rounds.job import Job
from simulator.rounds.linear_programs import Solve
from simulator.rounds.policies.base import Choice

Shares = Callable[[Sequence[Job], float, Solve], Sequence[float]]
"""(active jobs, GPUs, solver) -> the share of time in which each job is to run, from 0 to 1."""

RESET_S = 1000.0
"""Shares are computed again at most this often, in seconds."""

HEAD_START_S = 60.0
"""Time that a job counts as having received when its shares begin, in seconds."""


@dataclass(slots=True)
class Account:
    """Share of one job, the time it received since the last reset, and the time it was still owed then."""

    share: float | None = None
    received_s: float = HEAD_START_S
    deficit_s: float = 0.0


class RunByShares:
    """Policy that gives each job its share of time over many rounds."""

    def __init__(self, shares: Shares, solve: Solve) -> None:
        self._shares = shares
        self._solve = solve
        self._accounts: dict[Job, Account] = {}
        self._received_s = 0.0
        self._reset_at = 0.0
        self._stale = True

    def arrived(self, job: Job) -> None:
        self._accounts[job] = Account()
        self._stale = True

    def ran(self, job: Job, seconds: float) -> None:
        self._accounts[job].received_s += seconds
        self._received_s += seconds
        if not seconds:
            self._stale = True

    def left(self, job: Job) -> None:
        del self._accounts[job]
        self._stale = True

    def rank(self, jobs: Sequence[Job], gpus: float, now: float) -> list[Choice]:
        # A job that no server could take when the shares were computed has none.
        is_stale = self._stale or any(self._accounts[job].share is None for job in jobs)
        # as in Gavel's code, time 0 counts as "never reset", so that the first round may reset again
        if is_stale and (now - self._reset_at >= RESET_S or self._reset_at == 0):
            self._reset(jobs, gpus, now)
        accounts = self._accounts
        ranked = sorted(jobs, key=lambda job: self._claim(accounts[job]), reverse=True)
        return [Choice(job, job.gpus, accounts[job].share is not None) for job in ranked]

    def _claim(self, account: Account) -> tuple[float, float, float]:
        share = account.share or 0.0
        priority = share / (account.received_s / self._received_s) if share else 0.0
        return priority, account.deficit_s, share

    def _reset(self, jobs: Sequence[Job], gpus: float, now: float) -> None:
        since_s = now - self._reset_at
        for job in jobs:
            account = self._accounts[job]
            account.deficit_s += (account.share or 0.0) * since_s - (account.received_s - HEAD_START_S)
            account.received_s = HEAD_START_S
        self._received_s = HEAD_START_S * len(jobs)
        self._reset_at = now
        for job, share in zip(jobs, self._shares(jobs, gpus, self._solve), strict=True):
            self._accounts[job].share = float(share)
        self._stale = False
