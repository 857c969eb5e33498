"""Jobs of any workload in rounds: a request, and a run time that restarts prolong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from resource_manager.core.changes import Cancelled, Change
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from simulator.errors import SimulationError
from simulator.replay.workload import ServerChange, Workload
from simulator.rounds.fixed_rounds import FixedRounds
from simulator.rounds.job import RunningJob
from simulator.rounds.leases import RequestLeases, gpus_of
from simulator.rounds.policies.base import RoundPolicy

RESIZES = (
    "resizes jobs, and this workload does not say how fast a job is on other numbers of GPUs: use --trace "
    "pollux or shockwave, or another policy"
)


@dataclass(slots=True, eq=False)
class TimedJob(RunningJob):
    """A job that needs its GPUs for so many seconds; a step is one second.

    One that did not end in its record is taken to need them for as long as that went on.
    """

    request: Request = field(kw_only=True)
    runtime_s: float = field(kw_only=True)
    stay_s: float = field(kw_only=True)
    """How long policies take it to need them in all."""
    done_s: float = 0.0

    @property
    def steps_left(self) -> float:
        return self.stay_s - self.done_s

    @property
    def rate(self) -> float:
        return 1.0

    @property
    def max_gpus(self) -> int:
        raise SimulationError(f"this policy {RESIZES}")

    @property
    def exclusive_s(self) -> float:
        return self.runtime_s

    def step_s(self, gpus: int) -> float:
        return 1.0

    def advance(self, seconds: int) -> float | None:
        left = self.runtime_s - self.done_s
        self.done_s += min(seconds, left)
        return left if left <= seconds else None


def timed_rounds(workload: Workload, policy: RoundPolicy) -> FixedRounds:
    """Return the replay of a workload in rounds; the first server that fits is chosen.

    What was recorded as running or pending at first arrives then. A job that was still running when the
    recording ended leaves at that time.
    """
    times = [*(batch.at for batch in workload.batches), *(job.submitted_at for job in workload.jobs)]
    end = max(times, default=0.0)
    jobs = [
        TimedJob(
            job.request.lease_id,
            job.submitted_at,
            gpus_of(job.request),
            request=job.request,
            runtime_s=job.runtime_s,
            stay_s=end - job.submitted_at if job.runtime_s == math.inf else job.runtime_s,
        )
        for job in workload.jobs
    ]
    external: list[Change] = [
        event
        for batch in workload.batches
        for event in batch.external
        if isinstance(event, ServerChange | Cancelled)
    ]
    external += [Cancelled(job.name, end) for job in jobs if job.runtime_s == math.inf]
    cluster = ClusterState.from_snapshot(
        replace(workload.start, leases=(), remainders=(), pending=(), watched=(), cleaning=())
    )
    leases = RequestLeases(cluster, first_fit, (job.request for job in jobs))
    return FixedRounds(jobs, leases, policy, external)
