"""How the jobs of a replay go on: as recorded while their lease follows a recorded one, else by runtime."""

from __future__ import annotations

import math
from enum import Enum, auto

from resource_manager.core import changes
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import AVOIDED_S
from resource_manager.core.models import KEY_SEPARATOR, Lease
from resource_manager.scheduling import lease_steps
from resource_manager.scheduling.queue.orders import STARVATION_LIMIT_S
from resource_manager.scheduling.queue.windows import MAX_OCCURRENCES
from simulator.engine import EventQueue
from simulator.errors import SimulationError
from simulator.openings import first_opening, repeats_by
from simulator.replay.job_runs import JobRun, Record
from simulator.replay.workload import Part

MAX_LOOKS = 100_000
"""Begins and ends of maintenance windows after the last event after which a replay gives up."""


class Due(Enum):
    """Something that is due for a lease of a job that goes another way than it was recorded."""

    END = auto()
    SAVED = auto()
    """Its job was told to end, and has saved what it did."""
    CLEAN = auto()


def starved_at(queued_at: float) -> float:
    """Return when a request that waits since then goes first in some orders."""
    return math.nextafter(queued_at + STARVATION_LIMIT_S, math.inf)


class JobCourses:
    """The jobs of a record on a cluster, told of each change; a checkpoint is taken each `checkpoint_s`."""

    def __init__(self, cluster: ClusterState, record: Record, checkpoint_s: float) -> None:
        self.cluster = cluster
        self._workload = workload = record.workload
        self.job_runs = record.job_runs
        self._checkpoint_s = checkpoint_s
        self.due: EventQueue[tuple[Due, Lease] | None] = EventQueue()
        """What is due for leases; None is a time at which something may be decided without an event."""
        self.saved: list[Lease] = []
        """Preempted leases whose jobs end at once."""
        self.tokens = {entry.fencing_token: entry.fencing_token for entry in workload.start.cleaning}
        """Fencing token by the recorded one, of leases that hold the same GPUs."""
        self.begun_to_end: set[int] = set()
        """Recorded fencing tokens of leases of which an end was played: who starts later follows none."""
        self.cleaned_here: set[int] = set()
        """Fencing tokens of leases whose GPUs are clean at another time than in the recording."""
        self._starved_at = -math.inf
        """When the queue is looked at for a request that has waited for a day; past if that is not due."""
        self._window_at = -math.inf
        """When the queue is looked at for a maintenance window; past if that is not due."""
        self._looks = self._idle_looks = 0
        """Looks for windows after the last event, and in a row that nothing followed from."""
        self._idle_until = -math.inf
        """When nothing new can follow from looks, unless something followed from one before."""
        present = {lease.lease_id: lease for lease in (*workload.start.leases, *workload.start.remainders)}
        self._remainders = {name: lease.key for name, lease in present.items() if lease.ranks}
        """Key of what is left of a gang, by the id of its task."""
        for job in workload.present:
            self.job_runs[job.request.lease_id] = job_run = JobRun(job)
            lease = present.get(job.request.lease_id)
            if lease is not None:
                job_run.started_at, job_run.lease = lease.granted_at, lease
                job_run.follows = job.recorded[0]
                self.tokens[lease.fencing_token] = lease.fencing_token
        if workload.batches:
            self._decide_at_windows(workload.batches[0].at)
        self._decide_on_starved(-math.inf)

    def lease(self, task_id: str) -> Lease | None:
        key = self._remainders.get(task_id)
        return self.cluster.leases.get(task_id) if key is None else self.cluster.remainders.get(key)

    def changes_due(self) -> list[changes.Change]:
        """Return the changes for what is due next, the ends of all jobs of one time together."""
        now = self.due.next_time
        # A job that has just saved what it did may be done.
        due = {(kind, lease.fencing_token): lease for kind, lease in filter(None, self.due.pop_due(now))}
        if -math.inf < self._starved_at <= now:
            self._decide_on_starved(now)
        if -math.inf < self._window_at <= now:
            self._look_on(now)
        return [
            change
            for (kind, token), lease in due.items()
            if kind is not Due.SAVED or (Due.END, token) not in due
            for change in self._due_changes(kind, lease, now)
        ]

    def _due_changes(self, due: Due, lease: Lease, now: float) -> list[changes.Change]:
        """Return the changes for what is due, none for a lease that ended before."""
        if due is Due.CLEAN:
            return self._cleaned(lease, now)
        job_run = self.job_runs[lease.lease_id]
        held = self.lease(lease.lease_id)
        if held is None or held.fencing_token != lease.fencing_token or job_run.follows is not None:
            return []
        if due is Due.SAVED:
            return self._ended_early(held, now) if held.preempted_by else []
        released = changes.new_released(held.lease_id, held.fencing_token, now, job_run.job.outcome)
        return [released, *self.clean_later(held, now)]

    def _ended_early(self, lease: Lease, now: float) -> list[changes.Change]:
        """Return the end of a preempted lease, whose request waits again."""
        ended = lease_steps.release(self.cluster, lease.lease_id, now, outcome=changes.Outcome.PREEMPTED)
        return [*ended, *self.clean_later(lease, now)]

    def ended_at_once(self, now: float) -> list[changes.Change]:
        """Return the ends of the leases whose jobs end at once, and forget them."""
        saved, self.saved = self.saved, []
        return [change for lease in saved for change in self._ended_early(lease, now)]

    def clean_later(self, lease: Lease, now: float) -> list[changes.Change]:
        """See to it that the GPUs of an ended lease are clean after as long as it took in the recording."""
        self.cleaned_here.add(lease.fencing_token)
        clean_s = self.job_runs[lease.lease_id].job.clean_s
        if not any(self.cluster.by_name[member.node].watched for member in lease.members):
            return []
        if not clean_s:
            return self._cleaned(lease, now)
        self._schedule(now + clean_s, (Due.CLEAN, lease))
        return []

    def _cleaned(self, lease: Lease, now: float) -> list[changes.Change]:
        by_name = self.cluster.by_name
        return [
            changes.GpuCleaned(member.node, gpu_id, lease.fencing_token, now)
            for member in lease.members
            if member.node in by_name and not by_name[member.node].retired  # it leaves with its last lease
            for gpu_id in member.gpu_ids
        ]

    def note(self, change: changes.Change, now: float) -> None:
        """Take note of a change that was applied."""
        job_runs = self.job_runs
        if self._idle_looks:
            self._idle_looks = 0
            self._decide_at_windows(now, after=now)
        match change:
            case changes.Granted(lease=lease):
                self._note_start(job_runs[lease.lease_id], lease, now)
            case changes.Queued(request=request):
                self._note_wait(job_runs[request.lease_id], change, now)
            case changes.Preempting(lease_id=lease_id):
                self._note_preemption(job_runs[lease_id], change, now)
            case changes.Released(lease_id=lease_id, outcome=outcome):
                job_runs[lease_id].ended_at, job_runs[lease_id].outcome = now, outcome
                if change.failed_nodes:
                    self._schedule(now + AVOIDED_S, None)
            case changes.Expired(lease_id=lease_id):
                job_runs[lease_id].ended_at = now
            case changes.MembersReleased(lease_id=lease_id):
                job_run = job_runs[lease_id]
                job_run.left_at |= dict.fromkeys(change.ranks, now)
                self._remainders[lease_id] = f"{lease_id}{KEY_SEPARATOR}{change.fencing_token}"
                if len(job_run.left_at) >= len(job_run.members):
                    job_run.ended_at = now
            case changes.Cancelled(lease_id=lease_id):
                job_runs[lease_id].cancelled = True
            case changes.MaintenanceChanged():
                self._decide_at_windows(now)

    def _note_start(self, job_run: JobRun, lease: Lease, now: float) -> None:
        job_run.started_at, job_run.lease = now, lease
        recorded = job_run.job.recorded[len(job_run.parts) :]
        if recorded and recorded[0].lease.granted_at == now:
            token = recorded[0].lease.fencing_token
            job_run.follows = None if token in self.begun_to_end else recorded[0]
        if job_run.follows is None:
            self.run_on(job_run, lease, now)
        elif job_run.follows.lease.members == lease.members:
            self.tokens[job_run.follows.lease.fencing_token] = lease.fencing_token
        if (ledger := self.cluster.ledger) is not None:
            self._decide_at(now + ledger.min_runtime_s(lease.request.team))

    def _schedule(self, at: float, event: tuple[Due, Lease] | None) -> None:
        """Schedule an event, at once if its time is past: a recorded clock may have been set back."""
        self.due.schedule(max(at, self.due.now), event)

    def run_on(self, job_run: JobRun, lease: Lease, since: float) -> None:
        """Let the job run what is left of its runtime since then."""
        self._schedule(since + (job_run.job.runtime_s - job_run.saved_s), (Due.END, lease))

    def _note_wait(self, job_run: JobRun, change: changes.Queued, now: float) -> None:
        delay_s = change.request.preemption_delay_s
        self._decide_at(now + (self.cluster.teams.preemption_delay_s if delay_s is None else delay_s))
        if not self.due.now < self._starved_at <= starved_at(change.queued_at):
            self._decide_on_starved(now)
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

    def _note_preemption(self, job_run: JobRun, change: changes.Preempting, now: float) -> None:
        """Let the job end when it did in the recording, else once it has saved what it did."""
        assert job_run.lease is not None
        if not change.preemptor:  # it was taken back
            job_run.preempted_at, job_run.preempted_by = None, ""
            if job_run.follows is None:
                self.run_on(job_run, job_run.lease, job_run.lease.granted_at)
            return
        job_run.preempted_at, job_run.preempted_by = now, change.preemptor
        if job_run.follows is not None and now in job_run.follows.decided_at:
            return
        job_run.follows = None
        if save_s := job_run.job.save_s:
            self._schedule(now + save_s, (Due.SAVED, job_run.lease))
        else:
            self.saved.append(job_run.lease)

    def _decide_at_windows(self, now: float, after: float = -math.inf) -> None:
        """Look at the queue when a maintenance window next begins or ends, later than `after`."""
        found = (window.occurrence(now) for window in self.cluster.windows)
        times = (max(at, now) for times in found if times is not None for at in times if at > after)
        self._look_at_windows(min(times, default=math.inf))

    def stop_looking(self) -> None:
        """Look at the queue for no window any more."""
        self._window_at = -math.inf

    def _look_at_windows(self, at: float) -> None:
        self._window_at = at if at < math.inf else -math.inf
        self._schedule(at, None)

    def _look_on(self, now: float) -> None:
        """Look again at the next window; once nothing else is due, when one next lets a request start."""
        is_over = now >= self._workload.batches[-1].at
        self._looks += is_over
        if self._looks > MAX_LOOKS:
            raise SimulationError(
                f"not all jobs ended within {MAX_LOOKS:,} maintenance windows: one runs for too long, or is "
                "preempted by each before its first checkpoint"
            )
        if self.due or not is_over:
            self._decide_at_windows(now, after=now)
            return
        if not self._idle_looks:
            self._idle_until = repeats_by(self.cluster, now)
        self._idle_looks += 1
        waiting = (entry.request for entry in self.cluster.pending.values())
        at = first_opening(self.cluster, waiting, now, after=now)
        is_idle = self._idle_looks > MAX_OCCURRENCES or at > self._idle_until
        self._look_at_windows(math.inf if is_idle else at)

    def _decide_at(self, at: float) -> None:
        """Look again at that time: what may be preempted, and by whom, changes without an event."""
        if self.cluster.teams.preemption:
            self._schedule(at, None)

    def _decide_on_starved(self, now: float) -> None:
        """Look again when the next request has waited for so long that some orders put it first.

        That is one look for the queue, not one for each wait: most end before.
        """
        limits = (starved_at(entry.queued_at) for entry in self.cluster.pending.values())
        self._starved_at = min((at for at in limits if at > now), default=-math.inf)
        if self._starved_at > now:
            self._schedule(self._starved_at, None)
