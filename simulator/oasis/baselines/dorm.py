"""Dorm: an integer programme resizes partitions to fill the cluster, with bounded unfairness and resizing.

After Sun et al., Towards Distributed Machine Learning in Shared Clusters, 2017 (arXiv 1704.06738).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from simulator.oasis.baselines.drf import add_worker, dominant_share
from simulator.oasis.ledger import Ledger
from simulator.oasis.milp import Maximisation
from simulator.oasis.model import BANDWIDTH, RESOURCES, Instance, TrainingJob
from simulator.oasis.packing import capacity_rows, max_count_on, server_types

FAIRNESS_LOSS = 0.1
"""theta 1: the sum of distances from the fair shares may be this fraction of its worst value."""

ADJUSTMENTS = 0.1
"""theta 2: this fraction of the running jobs may be resized at a time, rounded up."""

TIME_LIMIT_S = 5.0
"""Time limit of one programme, in seconds; the best partition found by then is used."""


class Dorm:
    """Repartitioning when a job arrives or ends; every partition is kept in between."""

    def __init__(self, ledger: Ledger, instance: Instance) -> None:
        self.ledger = ledger
        self.types = server_types(instance.worker_servers)
        self.ps_types = server_types(instance.ps_servers)
        self.jobs: dict[str, TrainingJob] = {}
        self.workers: dict[str, int] = {}
        self.changed = False

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        self.jobs[job.job_id] = job
        self.changed = True
        return True

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        ended = [job_id for job_id in self.jobs if job_id not in remaining]
        for job_id in ended:
            del self.jobs[job_id]
            self.workers.pop(job_id, None)
        if self.jobs and (self.changed or ended):
            self.workers = self.repartition(list(self.jobs.values())) or self.workers
            self.changed = False
        for job_id, workers in self.workers.items():
            job = self.jobs[job_id]
            for held in range(min(workers, remaining[job_id])):
                if not add_worker(self.ledger, slot, job, held):
                    break

    def repartition(self, jobs: Sequence[TrainingJob]) -> dict[str, int] | None:
        """Return workers by job id, running jobs first; None if no partition satisfies the bounds."""
        model = Maximisation()
        columns: dict[str, list[int]] = {}
        servers: dict[str, list[int]] = {}
        for job in jobs:
            gain = sum(share_of(self.ledger, job))
            columns[job.job_id] = [
                model.add(min(job.chunks, max_count_on(kind, job.worker_units)), gain) for kind in self.types
            ]
            servers[job.job_id] = [
                model.add(min(job.ps_for[-1], max_count_on(kind, job.ps_units))) for kind in self.ps_types
            ]
            workers = dict.fromkeys(columns[job.job_id], 1.0)
            model.constrain(workers, at_most=job.chunks)
            sent = dict.fromkeys(columns[job.job_id], job.worker[BANDWIDTH])
            taken = dict.fromkeys(servers[job.job_id], -job.ps[BANDWIDTH])
            model.constrain({**sent, **taken}, at_most=0)
        for by_job, types, demands in (
            (columns, self.types, [job.worker_units for job in jobs]),
            (servers, self.ps_types, [job.ps_units for job in jobs]),
        ):
            for index, kind in enumerate(types):
                for row in capacity_rows(kind, demands):
                    terms = {by_job[job.job_id][index]: c for job, c in zip(jobs, row, strict=True)}
                    model.constrain(terms, at_most=len(kind.servers))
        self._bound_unfairness(model, jobs, columns)
        self._bound_adjustments(model, jobs, columns)
        solution = model.solve(TIME_LIMIT_S)
        if not solution.values:
            return None
        found = {job_id: sum(map(solution.whole, each)) for job_id, each in columns.items()}
        before = [job_id for job_id in self.workers if job_id in found]
        return {job_id: found[job_id] for job_id in dict.fromkeys([*before, *found])}

    def _bound_unfairness(
        self, model: Maximisation, jobs: Sequence[TrainingJob], columns: Mapping[str, list[int]]
    ) -> None:
        distances = []
        for job, fair in zip(jobs, fair_workers(self.ledger, jobs), strict=True):
            one = dominant_share(self.ledger, job, 1)
            distance = model.add(math.inf, integer=False)
            share = dict.fromkeys(columns[job.job_id], one)
            model.constrain({**share, distance: -1.0}, at_most=fair * one)
            model.constrain({**share, distance: 1.0}, at_least=fair * one)
            distances.append(distance)
        model.constrain(dict.fromkeys(distances, 1.0), at_most=FAIRNESS_LOSS * 2 * len(RESOURCES))

    def _bound_adjustments(
        self, model: Maximisation, jobs: Sequence[TrainingJob], columns: Mapping[str, list[int]]
    ) -> None:
        resized = []
        for job in jobs:
            before = self.workers.get(job.job_id, 0)
            if not before:
                continue
            resized.append(model.add(1))
            workers = dict.fromkeys(columns[job.job_id], 1.0)
            model.constrain({**workers, resized[-1]: -float(job.chunks)}, at_most=before)
            model.constrain({**workers, resized[-1]: float(job.chunks)}, at_least=before)
        if resized:
            model.constrain(dict.fromkeys(resized, 1.0), at_most=math.ceil(ADJUSTMENTS * len(resized)))


def share_of(ledger: Ledger, job: TrainingJob) -> list[float]:
    """Return the fraction of each worker resource that one worker takes."""
    total = ledger.worker.total
    return [amount / total[r] if total[r] else 0.0 for r, amount in enumerate(job.worker_units)]


def fair_workers(ledger: Ledger, jobs: Sequence[TrainingJob]) -> list[float]:
    """Return the workers of each job at equal dominant shares, as large as fit the cluster as a whole."""
    one = [max(share_of(ledger, job)) for job in jobs]

    def at(level: float) -> list[float]:
        return [
            min(float(job.chunks), level / share) if share else 0.0  # no server has what the job requests
            for job, share in zip(jobs, one, strict=True)
        ]

    def fits(workers: Sequence[float]) -> bool:
        asked = [[n * share for share in share_of(ledger, job)] for n, job in zip(workers, jobs, strict=True)]
        return all(sum(column) <= 1 for column in zip(*asked, strict=True))

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(at(middle)) else (low, middle)
    return at(low)
