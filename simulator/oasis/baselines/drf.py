"""Dominant-resource fairness: the job with the least gets the next worker (Ghodsi et al., NSDI 2011)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from resource_manager.core.models import Lease
from simulator.oasis.ledger import PS, WORKER, Ledger, Pool, demand_of
from simulator.oasis.model import TrainingJob


class Drf:
    """Progressive filling of every slot; a job grows and shrinks as others come and go."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.jobs: dict[str, TrainingJob] = {}

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        self.jobs[job.job_id] = job
        return True

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        self.jobs = {job_id: job for job_id, job in self.jobs.items() if job_id in remaining}
        held = dict.fromkeys(self.jobs, 0)
        # The order of arrival breaks ties.
        poorest = [(0.0, index, job) for index, job in enumerate(self.jobs.values())]
        while poorest:
            _, index, job = heapq.heappop(poorest)
            if held[job.job_id] < min(job.chunks, remaining[job.job_id]) and add_worker(
                self.ledger, slot, job, held[job.job_id]
            ):
                held[job.job_id] += 1
                share = dominant_share(self.ledger, job, held[job.job_id])
                heapq.heappush(poorest, (share, index, job))


def dominant_share(ledger: Ledger, job: TrainingJob, workers: int) -> float:
    """Return the largest share of any resource of the worker or PS servers that so many workers take."""
    shares = (
        count * (amount / total)
        for pool, count in ((ledger.worker, workers), (ledger.ps, job.ps_for[workers]))
        for amount, total in zip(demand_of(job, pool.role), pool.total, strict=True)
        if total > 0
    )
    return float(max(shares, default=0.0))


def add_worker(ledger: Ledger, slot: int, job: TrainingJob, workers: int) -> bool:
    """Allocate one more worker and the PS that its bandwidth needs, or nothing if either does not fit."""
    added: list[Lease] = []
    for role, count in ((WORKER, 1), (PS, job.ps_for[workers + 1] - job.ps_for[workers])):
        for _ in range(count):
            server = freest_server(ledger.pool(role), job, slot)
            if server is None:
                for lease in added:
                    ledger.remove(slot, lease)
                return False
            added.append(ledger.place(slot, job, role, server, 1))
    return True


def freest_server(pool: Pool, job: TrainingJob, slot: int) -> int | None:
    """Return the server that fits the most workers (or PS) of the job in the slot; None if none fits one."""
    fit = pool.fit(job, slot, slot + 1)[0]
    server = int(fit.argmax())
    return server if fit[server] > 0 else None
