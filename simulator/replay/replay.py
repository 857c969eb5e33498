"""Replay of a workload through the allocator under a placement policy and a queue order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from resource_manager.core.changes import (
    Change,
    Expired,
    Granted,
    InventoryChanged,
    Preempting,
    Quarantined,
    Released,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import by_lease, by_time
from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.maintenance import is_window
from resource_manager.core.models import Request
from resource_manager.core.runtimes import job_id_of
from resource_manager.core.teams import Teams
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import Policy
from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from resource_manager.scheduling.queue.orders import QueueDiscipline
from resource_manager.scheduling.queue.windows import ending
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.errors import SimulationError
from simulator.progress import Progress, no_progress
from simulator.replay.cluster_samples import Sampler
from simulator.replay.job_courses import JobCourses
from simulator.replay.job_runs import JobRun, Record
from simulator.replay.recorded_events import changes_of
from simulator.replay.workload import Decision, EventBatch, Workload, decisions_of

BATCHES_PER_REPORT = 64

CHECKPOINT_S = 1800.0
"""Time between two checkpoints of a job; what it did since the last is lost when its lease is taken."""


class Replay:
    """One run; the same workload, policy and order give the same record.

    `teams` are rules in place of all that the workload has, also where they say nothing; None for its own.

    As long as a replay of a recording decides what was decided then, it looks at the queue when the manager
    did; after the first other decision also whenever something may be decided without an event.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        order: QueueDiscipline,
        teams: Teams | None = None,
        checkpoint_s: float = CHECKPOINT_S,
    ) -> None:
        self._policy = policy
        self._order = order
        self.cluster = ClusterState.from_snapshot(
            workload.start if teams is None else replace(workload.start, teams=teams)
        )
        self.record = Record(workload, teams=teams)
        self._is_as_recorded = workload.is_recorded
        self._courses = JobCourses(self.cluster, self.record, checkpoint_s)
        fragmentation = Fragmentation.of(job.request for job in workload.jobs)
        self._sampler = Sampler(self.record.samples, fragmentation)

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
        if self._is_as_recorded:  # it stays so, and decides nothing at windows
            self._courses.stop_looking()
        self._end_until(math.inf)
        progress(len(batches), len(batches))
        return self.record

    # ---- what happens without an event ----

    def _end_until(self, time: float) -> None:
        """End the jobs due up to that time, those of one time together: capacity is freed before arrivals."""
        queue = self._courses.due
        while queue and queue.next_time <= time:
            now = queue.next_time
            over = self._courses.changes_due()
            if over or not self._is_as_recorded:
                over = [*self._under_maintenance(over, now), *over]
            if over or (self.cluster.pending and not self._is_as_recorded):
                changes = self._with_dispatch(over, now)
                if changes:  # where nothing is decided, the record does not go on
                    self._commit(changes, now)

    def _under_maintenance(self, changes: Sequence[Change], now: float) -> list[Change]:
        """Return the preemptions by windows that are open, but for leases that these changes end or limit."""
        if not self.cluster.windows:
            return []
        gone = {
            change.lease_id
            for change in changes
            if isinstance(change, Released | Expired | Quarantined)
            or (isinstance(change, Preempting) and change.preemptor in LIMITS)
        }
        return [change for change in ending(self.cluster, now) if change.lease_id not in gone]

    # ---- events ----

    def _play(self, batch: EventBatch) -> None:
        now, before = batch.at, len(self.record.changes)
        events = batch.external
        if self.record.teams is not None:
            events = [event for event in events if not isinstance(event, TeamsChanged)]
        changes = [change for event in events for change in changes_of(event, self._courses, now)]
        if batch.expires or not self._is_as_recorded:
            changes = [*self._under_maintenance(changes, now), *changes]
        if changes or not (batch.external or batch.arrivals or not self.cluster.pending):
            self._apply(changes, batch.dispatches or not self._is_as_recorded, now)
        for job in batch.arrivals:
            self.record.job_runs[job.request.lease_id] = JobRun(job)
            self._inherit(job.request.lease_id, now)
        if batch.arrivals:
            self._arrive(batch)
        while self._is_as_recorded:
            made = decisions_of(self.record.changes[before:])
            self._is_as_recorded = made == batch.decided[: len(made)]
            if not self._is_as_recorded or len(made) == len(batch.decided):
                break
            # Operations that change nothing but decide leave no trace of where they begin.
            again = allocator.schedule_pending(self.cluster, self._pass(now))
            self._is_as_recorded = bool(again)
            self._commit(again, now)

    def _inherit(self, name: str, now: float) -> None:
        """Let a request have what is preempted for an earlier one of its id, and avoid where that failed.

        A manager does both, since the id is the same there.
        """
        job_id = job_id_of(name)
        for lease_id in sorted(self.cluster.preempting):
            lease = self.cluster.leases[lease_id]
            by = lease.preempted_by
            if by not in self.cluster.pending and not is_window(by) and job_id_of(by) == job_id:
                self.cluster.apply(Preempting(lease_id, lease.fencing_token, name, lease.preempt_until, now))
        if failed := by_time(self.cluster.failed_starts):
            self.cluster.failed_starts = by_lease(
                replace(entry, lease_id=name) if job_id_of(entry.lease_id) == job_id else entry
                for entry in failed
            )

    def _apply(self, changes: list[Change], dispatches: bool, now: float) -> None:
        """Make external changes, then look at the queue."""
        if any(isinstance(change, InventoryChanged) for change in changes):
            self._commit(changes, now)  # it cannot be tried together with the grants that it makes possible
            changes = []
        self._commit(self._with_dispatch(changes, now) if dispatches else changes, now)

    def _arrive(self, batch: EventBatch) -> None:
        """Allocate as the manager does: at once while the queue is empty, then all together through it."""
        now = batch.at
        requests = [job.request for job in batch.arrivals]
        while requests and not self.cluster.pending:
            request = requests.pop(0)
            granted = allocator.allocate(self.cluster, request, self._pass(now))
            if not granted:
                queued = allocator.enqueue(self.cluster, [request], now)
                granted = self._with_dispatch(queued, now)
            self._commit(granted, now)
        decided = batch.decided if batch.at_once and self._is_as_recorded else []
        while requests and decided:
            grants, count = self._one_call(requests, decided, now)
            if not grants:
                break
            self._commit(grants, now)
            decided = decided[len(grants) :]
            del requests[:count]
        if requests:
            self._commit(self._with_dispatch(allocator.enqueue(self.cluster, requests, now), now), now)

    def _one_call(
        self, requests: Sequence[Request], decided: Sequence[Decision], now: float
    ) -> tuple[list[Granted], int]:
        """Return what one call for the first of these requests grants, and for how many it was.

        That is not recorded: it was for as many as lead to what was decided next. They do not wait, so nobody
        is preempted for them.
        """
        for count in range(len(requests), -1, -1):
            changes = self._with_dispatch(allocator.enqueue(self.cluster, requests[:count], now), now)
            grants = [change for change in changes if isinstance(change, Granted)]
            if grants and decisions_of(grants) == decided[: len(grants)]:
                return grants, count
        return [], 0

    def _pass(self, now: float) -> SchedulingPass:
        return SchedulingPass(self._policy, self._order, now)

    def _with_dispatch(self, changes: Sequence[Change], now: float) -> list[Change]:
        return allocator.with_dispatch(self.cluster, changes, self._pass(now))

    def _commit(self, changes: Sequence[Change], now: float) -> None:
        for change in changes:
            self.cluster.apply(change)
            self.record.changes.append(change)
            self._courses.note(change, now)
        self._sampler.take(self.cluster, now)
        while self._courses.saved:
            self._commit(self._with_dispatch(self._courses.ended_at_once(now), now), now)
