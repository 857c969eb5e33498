"""The operations of a manager in its history: external events, and what the scheduler decided after each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum, auto
from itertools import pairwise

from resource_manager.core import changes
from resource_manager.core.cluster import Snapshot
from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.maintenance import is_window
from resource_manager.core.models import Lease, Request
from resource_manager.scheduling.accounting.lives import Life
from simulator.replay.workload import EventBatch, Job, Part, decisions_of

ClusterChange = (
    changes.InventoryChanged
    | changes.TeamsChanged
    | changes.ClusterSettingsChanged
    | changes.MaintenanceChanged
)


def endless_request(request: Request) -> Request:
    """Return the request with a lifetime limited only by its recorded end."""
    return replace(request, ttl_s=math.inf)


class Parts:
    """The leases of each job of a recording.

    `again` are the fencing tokens of the leases whose requests were queued again with their end.
    """

    def __init__(self, lives: Iterable[Life], again: Collection[int]) -> None:
        self.again = again
        self._of_job: dict[str, list[Part]] = {}
        for life in lives:
            part = _part(life, waits_again=life.is_over and life.fencing_token in again)
            self._of_job.setdefault(life.lease.lease_id, []).append(part)

    def job(self, request: Request, submitted_at: float) -> Job:
        """Return the job of that request, with all its leases."""
        found = tuple(self._of_job.get(request.lease_id, ()))
        is_over = bool(found) and not found[-1].waits_again
        runtime_s = sum(part.ran_s for part in found) if is_over else math.inf
        outcome = found[-1].outcome if is_over else ""
        return Job(endless_request(request), submitted_at, runtime_s, found, outcome)


def _part(life: Life, *, waits_again: bool) -> Part:
    last = life.ends[-1] if life.is_over else None
    return Part(
        life.granted,
        life.preempted_at,
        life.preempted_by,
        life.ended_at,
        "" if last is None else changes.Outcome.FAILED if last.expired else last.outcome,
        waits_again,
        max(life.cleaned_at - life.ended_at, 0.0),
        life.preemptions,
    )


class Kind(Enum):
    """A kind of operations; changes of one kind that stand side by side are taken for one operation."""

    EXPIRY = auto()
    CLUSTER = auto()
    REPORT = auto()
    GRANT = auto()
    LOOK = auto()
    OTHER = auto()


class Operations:
    """The operations that a recording consists of, found change by change.

    Where one ends is not recorded. One that changes nothing but the queue begins with its arrival, one that
    ends a lease with its end; a decision belongs to the events before it.
    """

    def __init__(self, before: Snapshot, parts: Parts) -> None:
        self._parts = parts
        self._batches: list[EventBatch] = []
        self._kind = Kind.OTHER
        self._is_open = False
        """True until the scheduler decided something in the last operation."""
        self._pending = {entry.lease_id for entry in before.pending}
        self._windows = {window.window_id for window in before.windows}
        self._unusual = {lease.fencing_token for lease in before.leases}
        """Fencing tokens of leases that are quarantined or preempted, which a renewal may change."""
        self._checkpoints: dict[int, float | None] = {}

    def batches(self) -> tuple[EventBatch, ...]:
        """Return the operations.

        A manager applies a cluster in one operation and looks at the queue in the next.
        """
        for batch, following in pairwise(self._batches):
            is_applied = batch.external and isinstance(batch.external[0], ClusterChange)
            if is_applied and not batch.decided and not (following.external or following.arrivals):
                batch.dispatches = False
        return tuple(self._batches)

    def add(self, change: changes.Change) -> None:
        """Follow the next change."""
        match change:
            case changes.Queued(request=request):
                self._begin(change.at, Kind.OTHER).arrivals.append(self._parts.job(request, change.at))
                self._pending.add(request.lease_id)
            case changes.Granted(lease=lease) if lease.lease_id not in self._pending:
                self._granted_at_once(lease, change)
            case changes.Preempting() if change.preemptor in LIMITS:
                self._expiry(change).external.append(change)
            case changes.Preempting(by_operator=False) if is_window(change.preemptor):
                self._expiry(change).decided += decisions_of([change])
            case changes.Granted() | changes.Preempting(by_operator=False):
                self._decided(change)
            case changes.Quarantined(revoked=False) | changes.Expired():
                self._expiry(change).external.append(change)
            case (
                changes.AgentSeen()
                | changes.AgentLost()
                | changes.GpuClosed()
                | changes.GpuOpened()
                | changes.GpuCleaned()
                | changes.Drained()
                | changes.Resumed()
            ):
                # A new inventory closes the GPUs again that have other numbers in it.
                is_part = self._kind is Kind.CLUSTER and isinstance(change, changes.GpuClosed)
                self._join(change.at, Kind.CLUSTER if is_part else Kind.REPORT).external.append(change)
            case changes.InventoryChanged() | changes.TeamsChanged() | changes.ClusterSettingsChanged():
                self._join(change.at, Kind.CLUSTER).external.append(change)
            case changes.Renewed():
                self._renewed(change)
            case changes.Cancelled(lease_id=lease_id):
                self._pending.discard(lease_id)
                self._begin(change.at, Kind.OTHER).external.append(change)
            case changes.MaintenanceChanged(windows=windows):
                # A manager that adds a window does not look at the queue.
                found = {window.window_id for window in windows}
                batch = (
                    self._batches[-1]
                    if self._goes_on(change.at, Kind.CLUSTER)
                    else self._begin(change.at, Kind.OTHER, dispatches=found <= self._windows)
                )
                batch.external.append(change)
                self._windows = found
            case changes.Preempting():
                self._unusual.add(change.fencing_token)
                self._begin(change.at, Kind.OTHER, dispatches=False).external.append(change)
            case changes.Announced() | changes.Withdrawn():
                self._begin(change.at, Kind.OTHER, dispatches=False).external.append(change)
            case changes.JobPlaced() | changes.DeadlineRisk():
                pass  # the one decides how the lease may end, which is recorded; the other nothing
            case changes.Quarantined():
                self._unusual.add(change.fencing_token)
                self._begin(change.at, Kind.OTHER).external.append(change)
            case _:
                if isinstance(change, changes.Released) and change.fencing_token in self._parts.again:
                    self._pending.add(change.lease_id)
                self._begin(change.at, Kind.OTHER).external.append(change)

    def _begin(self, at: float, kind: Kind, *, dispatches: bool = True) -> EventBatch:
        self._batches.append(EventBatch(at, dispatches=dispatches))
        self._kind, self._is_open = kind, True
        return self._batches[-1]

    def _join(self, at: float, kind: Kind) -> EventBatch:
        """Return the last operation if it is of that time and kind and has no decisions, else another."""
        return self._batches[-1] if self._goes_on(at, kind) else self._begin(at, kind)

    def _goes_on(self, at: float, kind: Kind) -> bool:
        return self._is_open and self._kind is kind and self._batches[-1].at == at

    def _expiry(self, change: changes.Quarantined | changes.Expired | changes.Preempting) -> EventBatch:
        self._unusual.add(change.fencing_token)
        batch = self._join(change.at, Kind.EXPIRY)
        batch.expires = True
        return batch

    def _renewed(self, change: changes.Renewed) -> None:
        """Add a renewal only if it changes more than the end of its lease."""
        token = change.fencing_token
        if token in self._unusual or self._checkpoints.get(token) != change.checkpoint_at:
            self._checkpoints[token] = change.checkpoint_at
            self._begin(change.at, Kind.OTHER, dispatches=False).external.append(change)

    def _granted_at_once(self, lease: Lease, change: changes.Granted) -> None:
        """Add the grant of a request that was never pending: its arrival and a decision.

        Requests of one call are numbered before any is granted, beside a queue in the order of the queue,
        with the pending ones before them.
        """
        last = self._batches[-1] if self._batches else None
        if last is None or last.at != change.at or not self._joins_grants(lease):
            last = self._begin(change.at, Kind.GRANT)
        self._kind = Kind.GRANT
        last.at_once = lease.queued_at is not None
        last.arrivals.append(self._parts.job(lease.request, change.at))
        last.arrivals.sort(key=lambda job: job.recorded[0].lease.sequence)
        last.decided += decisions_of([change])

    def _joins_grants(self, lease: Lease) -> bool:
        """Return True if the grant of a request beside the queue follows such grants, or those of a look."""
        if lease.queued_at is None:
            return False
        return self._kind is Kind.LOOK or (self._kind is Kind.GRANT and self._batches[-1].at_once)

    def _decided(self, change: changes.Granted | changes.Preempting) -> None:
        if isinstance(change, changes.Granted):
            self._pending.discard(change.lease.lease_id)
        else:
            self._unusual.add(change.fencing_token)
        last = self._batches[-1] if self._batches else None
        if last is None or last.at != change.at or not last.dispatches:
            last = self._begin(change.at, Kind.LOOK)
        last.decided += decisions_of([change])
        self._is_open = False
