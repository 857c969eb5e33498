"""Gangs: fixed numbers of workers that run together, all or none, and stay on the same servers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.oasis.ledger import PS, WORKER, Ledger
from simulator.oasis.model import TrainingJob
from simulator.oasis.planner import Share, allocate_shares

MAX_WORKERS = 30
"""A gang has between one worker and this many (paper, section V)."""


@dataclass(frozen=True, slots=True)
class Gang:
    """A job with the number of workers it requested."""

    job: TrainingJob
    workers: int

    @property
    def slots(self) -> int:
        """Number of slots that the job takes with its gang complete."""
        return -(-self.job.work // self.workers)


def draw_gang(job: TrainingJob, rng: np.random.Generator, ledger: Ledger) -> Gang | None:
    """Return the job with a drawn number of workers, cut to what fits an empty slot; None if none fits.

    Without the cut, a gang that never fits would block the queue for ever.
    """
    wanted = min(int(rng.integers(1, MAX_WORKERS + 1)), job.chunks, job.work)
    workers = min(wanted, ledger.worker.fit_when_empty(job))
    while workers and job.ps_for[workers] > ledger.ps.fit_when_empty(job):
        workers -= 1
    return Gang(job, workers) if workers else None


def spread(ledger: Ledger, slot: int, gang: Gang) -> tuple[Share, ...] | None:
    """Return servers for the whole gang in the slot, those that fit most first; None if it does not fit."""
    shares: list[Share] = []
    for role, count in ((WORKER, gang.workers), (PS, gang.job.ps_for[gang.workers])):
        fit = ledger.pool(role).fit(gang.job, slot, slot + 1)[0]
        if fit.sum() < count:
            return None
        for server in np.argsort(-fit, kind="stable").tolist():
            taken = min(count, int(fit[server]))
            if taken:
                shares.append(Share(slot, role, server, taken))
                count -= taken
    return tuple(shares)


def keep(ledger: Ledger, slot: int, gang: Gang, shares: tuple[Share, ...]) -> None:
    """Allocate the gang in another slot, on the servers it has."""
    allocate_shares(
        ledger, gang.job, (Share(slot, share.role, share.server, share.count) for share in shares)
    )
