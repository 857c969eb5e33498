"""What a replay did: each job with its leases, the changes, and the cluster over time."""

from __future__ import annotations

from dataclasses import dataclass, field

from resource_manager.core.changes import Change, Outcome
from resource_manager.core.models import Lease, Placement
from resource_manager.core.teams import Teams
from simulator.replay.cluster_samples import Sample
from simulator.replay.workload import Job, Part, Workload


@dataclass(slots=True)
class JobRun:
    """One job in a replay: its start, end and lease; times in seconds.

    `left_at` has the members of a gang that left it before its end, by rank; it ends with the last one.
    `parts` are its earlier leases, after which it waited again, and `saved_s` is how much of its runtime the
    last checkpoint holds. `follows` is the recorded lease that began when its lease did, None if that goes
    another way. `preempted_at` and `preempted_by` are about its lease.
    """

    job: Job
    started_at: float | None = None
    ended_at: float | None = None
    lease: Lease | None = None
    cancelled: bool = False
    left_at: dict[int, float] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    saved_s: float = 0.0
    follows: Part | None = None
    preempted_at: float | None = None
    preempted_by: str = ""
    outcome: str = ""

    @property
    def ran_s(self) -> float:
        """How long it ran before it waited again."""
        return sum(part.ran_s for part in self.parts)

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return sum(part.outcome == Outcome.PREEMPTED for part in self.parts)

    @property
    def first_started_at(self) -> float | None:
        """When its first lease began; None if it had none."""
        return self.parts[0].lease.granted_at if self.parts else self.started_at

    @property
    def members(self) -> tuple[Placement, ...]:
        """The placements by rank, one unless the job is a gang; none before the start."""
        return () if self.lease is None else self.lease.members

    @property
    def leases(self) -> list[Part]:
        """All its leases so far."""
        if self.lease is None:
            return self.parts
        return [*self.parts, Part(self.lease, self.preempted_at, self.preempted_by)]


@dataclass(slots=True)
class Record:
    """Every job of a replay, the changes that the manager would have stored, and the cluster over time.

    `teams` are the rules that it was given; None if it went by those of the workload.
    """

    workload: Workload
    job_runs: dict[str, JobRun] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    teams: Teams | None = None
