"""Replay of a workload through the allocator under a placement policy and a queue order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    GpuCleaned,
    Granted,
    InventoryChanged,
    MaintenanceChanged,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    TeamsChanged,
    new_released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.maintenance import is_window
from resource_manager.core.models import KEY_SEPARATOR, MILLI_PER_GPU, Lease, Request
from resource_manager.core.runtimes import job_id_of
from resource_manager.core.teams import NO_TEAMS, Teams
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import Policy
from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from resource_manager.scheduling.queue.orders import QueueDiscipline
from resource_manager.scheduling.queue.windows import ending
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.engine import EventQueue
from simulator.errors import SimulationError
from simulator.progress import Progress, no_progress
from simulator.replay.job_runs import JobRun, Record, Sample
from simulator.replay.workload import (
    Decision,
    EventBatch,
    ExternalEvent,
    LeaseChange,
    Part,
    Workload,
    decisions_of,
)

BATCHES_PER_REPORT = 64

CHECKPOINT_S = 1800.0
"""Time between two checkpoints of a job; what it did since the last is lost when its lease is taken."""


class Due(Enum):
    """Something that is due for a lease of a job that goes another way than it was recorded."""

    END = auto()
    SAVED = auto()
    """Its job was told to end, and has saved what it did."""
    CLEAN = auto()


class Replay:
    """One run; the same workload, policy and order give the same record.

    As long as a replay of a recording decides what was decided then, it looks at the queue when the manager
    did; after the first other decision also whenever something may be decided without an event.
    """

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
        self._order = order
        self.cluster = ClusterState.from_snapshot(
            replace(workload.start, teams=teams) if teams else workload.start
        )
        self.record = Record(workload, teams=teams)
        self._is_as_recorded = workload.is_recorded
        self._due: EventQueue[tuple[Due, Lease] | None] = EventQueue()
        """What is due for leases; None is a time at which something may be decided without an event."""
        self._saved: list[Lease] = []
        """Preempted leases whose jobs end at once."""
        self._tokens = {entry.fencing_token: entry.fencing_token for entry in workload.start.cleaning}
        """Fencing token by the recorded one, of leases that hold the same GPUs."""
        self._begun_to_end: set[int] = set()
        """Recorded fencing tokens of leases of which an end was played: who starts later follows none."""
        self._cleaned_here: set[int] = set()
        """Fencing tokens of leases whose GPUs are clean at another time than in the recording."""
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
                job_run.follows = job.recorded[0]
                self._tokens[lease.fencing_token] = lease.fencing_token
        self._look_at_windows(-math.inf)

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

    # ---- what happens without an event ----

    def _end_until(self, time: float) -> None:
        """End the jobs due up to that time, those of one time together: capacity is freed before arrivals."""
        while self._due and self._due.next_time <= time:
            now = self._due.next_time
            # A job that has just saved what it did may be done.
            due = {(kind, lease.fencing_token): lease for kind, lease in filter(None, self._due.pop_due(now))}
            over = [
                change
                for (kind, token), lease in due.items()
                if kind is not Due.SAVED or (Due.END, token) not in due
                for change in self._due_changes(kind, lease, now)
            ]
            if over or not self._is_as_recorded:
                over = [*self._under_maintenance(over, now), *over]
            if over or (self.cluster.pending and not self._is_as_recorded):
                self._commit(self._with_dispatch(over, now), now)

    def _due_changes(self, due: Due, lease: Lease, now: float) -> list[Change]:
        """Return the changes for what is due, none for a lease that ended before."""
        if due is Due.CLEAN:
            return self._cleaned(lease, now)
        job_run = self.record.job_runs[lease.lease_id]
        held = self._lease(lease.lease_id)
        if held is None or held.fencing_token != lease.fencing_token or job_run.follows is not None:
            return []
        if due is Due.SAVED:
            return self._ended_early(held, now) if held.preempted_by else []
        return [self._released(held, now), *self._clean_later(held, now)]

    def _ended_early(self, lease: Lease, now: float) -> list[Change]:
        """Return the end of a preempted lease, whose request waits again."""
        ended = lease_steps.release(self.cluster, lease.lease_id, now, outcome=Outcome.PREEMPTED)
        return [*ended, *self._clean_later(lease, now)]

    def _clean_later(self, lease: Lease, now: float) -> list[Change]:
        """See to it that the GPUs of an ended lease are clean after as long as it took in the recording."""
        self._cleaned_here.add(lease.fencing_token)
        clean_s = self.record.job_runs[lease.lease_id].job.clean_s
        if not any(self.cluster.by_name[member.node].watched for member in lease.members):
            return []
        if not clean_s:
            return self._cleaned(lease, now)
        self._due.schedule(max(now + clean_s, self._due.now), (Due.CLEAN, lease))
        return []

    def _cleaned(self, lease: Lease, now: float) -> list[Change]:
        by_name = self.cluster.by_name
        return [
            GpuCleaned(member.node, gpu_id, lease.fencing_token, now)
            for member in lease.members
            if member.node in by_name and not by_name[member.node].retired  # it leaves with its last lease
            for gpu_id in member.gpu_ids
        ]

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
        changes = [change for event in batch.external for change in self._changes_of(event, now)]
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
        """Let a request have what is being preempted for an earlier one of its id, as a manager does."""
        for lease_id in sorted(self.cluster.preempting):
            lease = self.cluster.leases[lease_id]
            by = lease.preempted_by
            if by not in self.cluster.pending and not is_window(by) and job_id_of(by) == job_id_of(name):
                self.cluster.apply(Preempting(lease_id, lease.fencing_token, name, lease.preempt_until, now))

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

    def _changes_of(self, event: ExternalEvent, now: float) -> list[Change]:
        """Return the changes that a recorded event makes here; none if it is about what is not so here."""
        match event:
            case Released() | Expired() | MembersReleased() | Renewed() | Quarantined():
                return self._lease_changes(event, now)
            case Preempting() if event.preemptor in LIMITS:
                return self._lease_changes(event, now)
            case GpuCleaned():
                token = self._tokens.get(event.fencing_token)
                if token is None or token in self._cleaned_here or event.node not in self.cluster.by_name:
                    return []
                return [replace(event, fencing_token=token)]
            case Preempting(lease_id=lease_id, preemptor=by):
                lease = self.cluster.leases.get(lease_id)
                if lease is None or lease.preempted_by or by not in self.cluster.pending:
                    return []
                return [replace(event, fencing_token=lease.fencing_token)]
            case Cancelled(lease_id=lease_id):
                if lease_id in self.cluster.pending:
                    return [event]
                lease = self.cluster.leases.get(lease_id)
                if lease is None:
                    return []
                return [new_released(lease_id, lease.fencing_token, now), *self._clean_later(lease, now)]
            case TeamsChanged(teams=rules):
                return [TeamsChanged(rules, now)]
        node = getattr(event, "node", None)
        return [event] if node is None or node in self.cluster.by_name else []

    def _lease_changes(self, event: LeaseChange, now: float) -> list[Change]:
        """Return the changes of an event of a recorded lease, none if no lease follows it."""
        if isinstance(event, Released | Expired | MembersReleased):
            self._begun_to_end.add(event.fencing_token)
        job_run = self.record.job_runs.get(event.lease_id)
        lease = self._lease(event.lease_id)
        part = None if job_run is None else job_run.follows
        if job_run is None or lease is None or part is None:
            return []
        if part.lease.fencing_token != event.fencing_token:
            return []
        token = lease.fencing_token
        if isinstance(event, Renewed):
            return [replace(event, fencing_token=token, expires_at=math.inf)]
        if isinstance(event, Quarantined | Preempting):
            return [replace(event, fencing_token=token)]
        if not (isinstance(event, Released) and part.waits_again):
            ended: list[Change] = [replace(event, fencing_token=token)]
        elif event.outcome in (Outcome.PREEMPTED, Outcome.IDLE) and lease.preempt_until == math.inf:
            job_run.follows = None  # it was not preempted here: it runs on
            self._run_on(job_run, lease, lease.granted_at)
            return []
        else:
            ended = lease_steps.release(self.cluster, lease.lease_id, now, outcome=event.outcome)
        is_there = part.lease.members == job_run.members
        return ended if is_there else [*ended, *self._clean_later(lease, now)]

    def _pass(self, now: float) -> SchedulingPass:
        return SchedulingPass(self._policy, self._order, now)

    def _with_dispatch(self, changes: Sequence[Change], now: float) -> list[Change]:
        return allocator.with_dispatch(self.cluster, changes, self._pass(now))

    def _lease(self, task_id: str) -> Lease | None:
        key = self._remainders.get(task_id)
        return self.cluster.leases.get(task_id) if key is None else self.cluster.remainders.get(key)

    def _released(self, lease: Lease, now: float) -> Released:
        outcome = self.record.job_runs[lease.lease_id].job.outcome
        return new_released(lease.lease_id, lease.fencing_token, now, outcome)

    # ---- what becomes of the jobs ----

    def _commit(self, changes: Sequence[Change], now: float) -> None:
        for change in changes:
            self.cluster.apply(change)
            self._note(change, now)
        self._sample(now)
        while saved := self._saved:
            self._saved = []
            ended = [change for lease in saved for change in self._ended_early(lease, now)]
            self._commit(self._with_dispatch(ended, now), now)

    def _note(self, change: Change, now: float) -> None:
        self.record.changes.append(change)
        job_runs = self.record.job_runs
        match change:
            case Granted(lease=lease):
                self._note_start(job_runs[lease.lease_id], lease, now)
            case Queued(request=request):
                self._note_wait(job_runs[request.lease_id], now)
            case Preempting(lease_id=lease_id):
                self._note_preemption(job_runs[lease_id], change, now)
            case Released(lease_id=lease_id, outcome=outcome):
                job_runs[lease_id].ended_at, job_runs[lease_id].outcome = now, outcome
            case Expired(lease_id=lease_id):
                job_runs[lease_id].ended_at = now
            case MembersReleased(lease_id=lease_id):
                job_run = job_runs[lease_id]
                job_run.left_at |= dict.fromkeys(change.ranks, now)
                self._remainders[lease_id] = f"{lease_id}{KEY_SEPARATOR}{change.fencing_token}"
                if len(job_run.left_at) >= len(job_run.members):
                    job_run.ended_at = now
            case Cancelled(lease_id=lease_id):
                job_runs[lease_id].cancelled = True
            case MaintenanceChanged():
                self._look_at_windows(now)

    def _note_start(self, job_run: JobRun, lease: Lease, now: float) -> None:
        job_run.started_at, job_run.lease = now, lease
        recorded = job_run.job.recorded[len(job_run.parts) :]
        if recorded and recorded[0].lease.granted_at == now:
            token = recorded[0].lease.fencing_token
            job_run.follows = None if token in self._begun_to_end else recorded[0]
        if job_run.follows is None:
            self._run_on(job_run, lease, now)
        elif job_run.follows.lease.members == lease.members:
            self._tokens[job_run.follows.lease.fencing_token] = lease.fencing_token
        self._look_again(now + self.cluster.teams.min_runtime_s)

    def _run_on(self, job_run: JobRun, lease: Lease, since: float) -> None:
        """Let the job run what is left of its runtime since then."""
        left_s = job_run.job.runtime_s - job_run.saved_s
        # A recorded clock may have been set back.
        self._due.schedule(max(since + left_s, self._due.now), (Due.END, lease))

    def _note_wait(self, job_run: JobRun, now: float) -> None:
        self._look_again(now + self.cluster.teams.preemption_delay_s)
        lease, begin = job_run.lease, job_run.started_at
        if lease is None or begin is None:
            return
        part = Part(lease, job_run.preempted_at, job_run.preempted_by, now, job_run.outcome, waits_again=True)
        job_run.parts.append(part)
        if job_run.follows is not None:
            job_run.saved_s += part.ran_s  # what was lost is not recorded
        elif part.ran_s:
            done_s = job_run.saved_s + now - begin
            job_run.saved_s = max(done_s - done_s % self._checkpoint_s, job_run.saved_s)
        job_run.started_at = job_run.ended_at = job_run.lease = job_run.follows = job_run.preempted_at = None
        job_run.preempted_by = job_run.outcome = ""

    def _note_preemption(self, job_run: JobRun, change: Preempting, now: float) -> None:
        """Let the job end when it did in the recording, else once it has saved what it did."""
        if not change.preemptor:
            self._note_taken_back(job_run)
            return
        job_run.preempted_at, job_run.preempted_by = now, change.preemptor
        if job_run.follows is not None and now in job_run.follows.decided_at:
            return
        job_run.follows = None
        assert job_run.lease is not None
        if save_s := job_run.job.save_s:
            self._due.schedule(max(now + save_s, self._due.now), (Due.SAVED, job_run.lease))
        else:
            self._saved.append(job_run.lease)

    def _note_taken_back(self, job_run: JobRun) -> None:
        """Let the job run on, unless it follows the recording."""
        job_run.preempted_at, job_run.preempted_by = None, ""
        if job_run.follows is None:
            assert job_run.lease is not None
            self._run_on(job_run, job_run.lease, job_run.lease.granted_at)

    def _look_at_windows(self, now: float) -> None:
        """Look at the queue when a maintenance window begins or ends, until the last event."""
        batches = self.record.workload.batches
        if not batches:
            return
        first, last = max(now, batches[0].at), batches[-1].at
        for window in self.cluster.windows:
            found = window.occurrence(first)
            while found is not None and found[0] <= last:
                begin, end = found
                for time in (begin, end):
                    self._due.schedule(max(time, self._due.now), None)
                found = window.occurrence(end)

    def _look_again(self, at: float) -> None:
        """Look again at that time: what may be preempted, and by whom, changes without an event."""
        if self.cluster.teams.preemption:
            self._due.schedule(max(at, self._due.now), None)

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
