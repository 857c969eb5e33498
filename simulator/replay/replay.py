"""Replay of a workload through the allocator under a placement policy and a queue order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Granted,
    MembersReleased,
    Outcome,
    Queued,
    Released,
    new_released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import KEY_SEPARATOR, MILLI_PER_GPU, Lease, Placement
from resource_manager.core.teams import NO_TEAMS, Teams
from resource_manager.scheduling import allocator
from resource_manager.scheduling.policies import Policy
from resource_manager.scheduling.policies.fgd import Fragmentation
from resource_manager.scheduling.queue_order import QueueDiscipline
from resource_manager.scheduling.runtime_history import RuntimeHistory, stated_runtime
from simulator.engine import EventQueue
from simulator.errors import SimulationError
from simulator.progress import Progress, no_progress
from simulator.replay.workload import EventBatch, ExternalEvent, Job, RecordedEnd, Workload

BATCHES_PER_REPORT = 64

CHECKPOINT_S = 1800.0
"""Time between two checkpoints of a job; what it did since the last is lost when its lease is taken."""


@dataclass(slots=True)
class JobRun:
    """One job in a replay: its start, end and lease; times in seconds.

    `left_at` has the members of a gang that left it before its end, by rank; it ends with the last one.
    `preempted` has the leases that were taken from it, each with begin and end, and `saved_s` how much of its
    runtime the last checkpoint holds.
    """

    job: Job
    started_at: float | None = None
    ended_at: float | None = None
    lease: Lease | None = None
    cancelled: bool = False
    left_at: dict[int, float] = field(default_factory=dict)
    preempted: list[tuple[Lease, float, float]] = field(default_factory=list)
    saved_s: float = 0.0

    @property
    def ran_s(self) -> float:
        """How long leases that were taken from it ran."""
        return sum(until - begin for _, begin, until in self.preempted)

    @property
    def members(self) -> tuple[Placement, ...]:
        """The placements by rank, one unless the job is a gang; none before the start."""
        return () if self.lease is None else self.lease.members


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster after all events of one time; servers may be added and removed."""

    at: float
    used_milli: int
    busy_nodes: int
    pending: int
    fragmented_milli: float
    gpu_milli: int
    nodes: int


@dataclass(slots=True)
class Record:
    """Every job of a replay, the changes that the manager would have stored, and the cluster over time."""

    workload: Workload
    job_runs: dict[str, JobRun] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    teams: Teams = NO_TEAMS


class Replay:
    """One run; the same workload, policy and order give the same record."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        order: QueueDiscipline,
        teams: Teams = NO_TEAMS,
        checkpoint_s: float = CHECKPOINT_S,
    ) -> None:
        self._policy = policy
        self._checkpoint_s = checkpoint_s
        self._history = RuntimeHistory()
        self._order = order.learning_from(stated_runtime, self._history.attained_gpu_s)
        self.cluster = ClusterState.from_snapshot(
            replace(workload.start, teams=teams) if teams else workload.start
        )
        self.record = Record(workload, teams=teams)
        self._ends: EventQueue[tuple[str, int] | None] = EventQueue()
        """Ends of leases by id and fencing token; None is a time at which something may be preempted."""
        self._fragmentation = Fragmentation.of(job.request for job in workload.jobs)
        self._of_node: list[tuple[int, int, float, int]] = []
        """Used milli, busy flag (0 or 1), fragmented milli and total milli of each node, as last sampled."""
        self._totals: list[float] = []
        self._mark = -1
        present = {lease.lease_id: lease for lease in (*workload.start.leases, *workload.start.remainders)}
        self._remainders = {name: lease.key for name, lease in present.items() if lease.ranks}
        """Key of what is left of a gang, by the id of its task."""
        for job in workload.present:
            self.record.job_runs[job.request.lease_id] = job_run = JobRun(job)
            lease = present.get(job.request.lease_id)
            if lease is not None:
                job_run.started_at, job_run.lease = lease.granted_at, lease

    def run(self, progress: Progress = no_progress) -> Record:
        """Play the workload until no job is left to end; only once, since it changes the state."""
        if self.record.samples:
            raise SimulationError("this replay has already run; create another Replay for another run")
        batches = self.record.workload.batches
        for done, batch in enumerate(batches):
            self._end_until(batch.at)
            self._play(batch)
            if not done % BATCHES_PER_REPORT:
                progress(done, len(batches))
        self._end_until(math.inf)
        progress(len(batches), len(batches))
        return self.record

    def _end_until(self, time: float) -> None:
        """End the jobs due up to that time, those of one time together: capacity is freed before arrivals."""
        while self._ends and self._ends.next_time <= time:
            now = self._ends.next_time
            ended = [self._lease(due[0]) for due in self._ends.pop_due(now) if due and self._is_of(*due)]
            over: list[Change] = [self._released(lease, now) for lease in ended if lease is not None]
            if over or self.cluster.pending:
                self._commit(self._with_dispatch(over, now), now)

    def _play(self, batch: EventBatch) -> None:
        now = batch.at
        changes = [change for event in batch.external if (change := self._external_change(event, now))]
        if changes:
            # A change of the inventory cannot be tried together with the grants that it makes possible.
            for change in changes:
                self._note(change, now)
                self.cluster.apply(change)
            changes = []
            if self.cluster.pending:
                changes = allocator.schedule_pending(self.cluster, self._policy, self._order, now)
            self._commit(changes, now)
        for job in batch.arrivals:
            self.record.job_runs[job.request.lease_id] = JobRun(job)
        if batch.arrivals:
            self._arrive(batch)

    def _arrive(self, batch: EventBatch) -> None:
        """Allocate as the manager does: at once while the queue is empty, then all together through it."""
        now = batch.at
        requests = [job.request for job in batch.arrivals]
        while requests and not self.cluster.pending:
            request = requests.pop(0)
            granted = allocator.allocate(self.cluster, request, self._policy, now)
            self._commit(granted or allocator.enqueue(self.cluster, [request], now), now)
        if requests:
            queued = allocator.enqueue(self.cluster, requests, now)
            self._commit(self._with_dispatch(queued, now), now)

    def _external_change(self, event: ExternalEvent, now: float) -> Change | None:
        """Return the change that a recorded event makes here; None if its job has not reached that event."""
        if isinstance(event, RecordedEnd):
            lease = self._lease(event.task_id)
            if lease is None or not _as_recorded(self.record.job_runs[event.task_id]):
                return None
            return self._released(lease, now)
        if isinstance(event, MembersReleased):
            lease = self._lease(event.lease_id)
            if lease is None or not _as_recorded(self.record.job_runs[event.lease_id]):
                return None
            return replace(event, fencing_token=lease.fencing_token)
        if isinstance(event, Cancelled):
            if event.lease_id in self.cluster.pending:
                return event
            lease = self.cluster.leases.get(event.lease_id)
            return None if lease is None else new_released(event.lease_id, lease.fencing_token, now)
        return event

    def _with_dispatch(self, changes: list[Change], now: float) -> list[Change]:
        return allocator.with_dispatch(self.cluster, changes, self._policy, self._order, now)

    def _is_of(self, task_id: str, fencing_token: int) -> bool:
        """Return True unless that lease of the task was preempted."""
        lease = self._lease(task_id)
        return lease is not None and lease.fencing_token == fencing_token

    def _lease(self, task_id: str) -> Lease | None:
        key = self._remainders.get(task_id)
        return self.cluster.leases.get(task_id) if key is None else self.cluster.remainders.get(key)

    def _released(self, lease: Lease, now: float) -> Released:
        outcome = self.record.job_runs[lease.lease_id].job.outcome
        return new_released(lease.lease_id, lease.fencing_token, now, outcome)

    def _commit(self, changes: list[Change], now: float) -> None:
        for change in changes:
            self.cluster.apply(change)
            self._note(change, now)
        self._sample(now)
        if taken := sorted(self.cluster.preempting):
            # Its job saves what it did and ends at once: how long that takes is not in the trace.
            ended = [
                change
                for lease_id in taken
                for change in allocator.release(self.cluster, lease_id, now, outcome=Outcome.PREEMPTED)
            ]
            self._commit(self._with_dispatch(ended, now), now)

    def _note(self, change: Change, now: float) -> None:
        self.record.changes.append(change)
        if self._order.uses_attained:
            self._history.add(change)
        job_runs = self.record.job_runs
        if isinstance(change, Granted):
            task_id = change.lease.lease_id
            job_run = job_runs[task_id]
            job_run.started_at, job_run.lease = now, change.lease
            if not _as_recorded(job_run):
                # A recorded clock may have been set back.
                left_s = job_run.job.runtime_s - job_run.saved_s
                due = (task_id, change.lease.fencing_token)
                self._ends.schedule(max(now + left_s, self._ends.now), due)
            self._look_again(now + self.cluster.teams.min_runtime_s)
        elif isinstance(change, Queued):
            self._look_again(now + self.cluster.teams.preemption_delay_s)
        elif isinstance(change, Released) and change.outcome == Outcome.PREEMPTED:
            job_run = job_runs[change.lease_id]
            assert job_run.lease is not None
            assert job_run.started_at is not None
            job_run.preempted.append((job_run.lease, job_run.started_at, now))
            done_s = job_run.saved_s + now - job_run.started_at
            job_run.saved_s = max(done_s - done_s % self._checkpoint_s, job_run.saved_s)
            job_run.started_at = job_run.lease = None
        elif isinstance(change, Released):
            job_runs[change.lease_id].ended_at = now
        elif isinstance(change, MembersReleased):
            job_run = job_runs[change.lease_id]
            job_run.left_at |= dict.fromkeys(change.ranks, now)
            self._remainders[change.lease_id] = f"{change.lease_id}{KEY_SEPARATOR}{change.fencing_token}"
            if len(job_run.left_at) >= len(job_run.members):
                job_run.ended_at = now
        elif isinstance(change, Cancelled):
            job_runs[change.lease_id].cancelled = True

    def _look_again(self, at: float) -> None:
        """Look again at that time: what may be preempted, and by whom, changes without an event."""
        if self.cluster.teams.preemption:
            self._ends.schedule(max(at, self._ends.now), None)

    def _sample(self, now: float) -> None:
        cluster = self.cluster
        changed = cluster.changed_since(self._mark) if self._mark >= 0 else None
        if changed is None:
            self._of_node = [(0, 0, 0.0, 0)] * len(cluster.nodes)
            self._totals = [0, 0, 0.0, 0]
            changed = list(range(len(cluster.nodes)))
        self._mark = cluster.mark
        for index in set(changed):
            node = cluster.nodes[index]
            milli = MILLI_PER_GPU * len(node.gpu_free)
            used = milli - node.free_milli
            figures = (used, int(bool(node.leases)), self._fragmentation.of_node(node), milli)
            for place, (new, old) in enumerate(zip(figures, self._of_node[index], strict=True)):
                self._totals[place] += new - old
            self._of_node[index] = figures
        used_milli, busy_nodes, fragmented_milli, gpu_milli = self._totals
        sample = Sample(
            now,
            int(used_milli),
            int(busy_nodes),
            len(cluster.pending),
            fragmented_milli,
            int(gpu_milli),
            len(cluster.nodes),
        )
        samples = self.record.samples
        if samples and samples[-1].at == now:
            samples[-1] = sample
        else:
            samples.append(sample)


def _as_recorded(job_run: JobRun) -> bool:
    recorded = job_run.job.recorded
    return recorded is not None and recorded.granted_at == job_run.started_at


def differences(record: Record) -> list[str]:
    """Return one line for each job that the replay placed or started otherwise than the recording."""
    found: list[str] = []
    for task_id, job_run in record.job_runs.items():
        was = job_run.job.recorded
        recorded = None if was is None else (was.granted_at, was.members)
        replayed = None if job_run.started_at is None else (job_run.started_at, job_run.members)
        if recorded != replayed:
            found.append(f"{task_id}: recorded {_describe(recorded)}, replayed {_describe(replayed)}")
    return found


def compare_with_record(record: Record, longest: int = 20) -> dict[str, Any]:
    """Return how the replay's decisions compare to the recorded ones, and which jobs start earlier.

    `started_earlier` lists the jobs that gain most, with the seconds gained.
    """
    moved = [
        (task_id, job_run.started_at - job_run.job.recorded.granted_at)
        for task_id, job_run in record.job_runs.items()
        if job_run.job.recorded is not None and job_run.started_at is not None
    ]
    earlier = sorted((shift, task_id) for task_id, shift in moved if shift < 0)
    different = len(differences(record))
    return {
        "decisions": len(record.job_runs),
        "same": len(record.job_runs) - different,
        "different": different,
        "earlier": len(earlier),
        "later": sum(shift > 0 for _, shift in moved),
        "started_earlier": [
            {"task_id": task_id, "earlier_s": round(-shift, 3)} for shift, task_id in earlier[:longest]
        ],
    }


def _describe(decision: tuple[float, tuple[Placement, ...]] | None) -> str:
    if decision is None:
        return "not started"
    at, members = decision
    return f"{', '.join(f'{member.node} {list(member.gpu_ids)}' for member in members)} at {at:.6g}"
