"""Promises about preempted leases, followed change by change beside the state that the checker keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from resource_manager.core.changes import Change, Outcome, Preempting, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.scheduling.preemption import RESTARTS


class Preemptions:
    """Leases that were taken for others: by right, told once, and back in the queue at their old place."""

    def __init__(self) -> None:
        self.victim = ""
        """The id of the preempted lease that the change before this one ended."""
        self.count = 0
        self._ended: Lease | None = None
        self._of_task: Counter[str] = Counter()

    def follow(self, cluster: ClusterState, change: Change) -> Iterator[str]:
        """Yield what the next change breaks; the cluster is the state before it."""
        ended, self._ended, self.victim = self._ended, None, ""
        if ended is not None:
            yield from self._queued_again(ended, change)
        if isinstance(change, Preempting):
            self.count += 1
            yield from _by_right(cluster, change)
        elif isinstance(change, Queued) and ended is None:
            self._of_task[change.request.lease_id] = 0
        elif isinstance(change, Released) and change.outcome == Outcome.PREEMPTED:
            lease = cluster.leases.get(change.lease_id)
            if lease is not None and lease.preempted_by:
                self._ended, self.victim = lease, lease.lease_id

    def _queued_again(self, lease: Lease, change: Change) -> Iterator[str]:
        if not isinstance(change, Queued) or change.request.lease_id != lease.lease_id:
            yield f"{lease.lease_id} was preempted and lost: {change} follows its end"
            return
        arrived = lease.granted_at if lease.queued_at is None else lease.queued_at
        if (change.queued_at, change.sequence) != (arrived, lease.sequence):
            yield f"{lease.lease_id} lost its place in the queue when it was preempted"
        before = int(lease.request.labels.get(RESTARTS, 0))
        if int(change.request.labels.get(RESTARTS, 0)) != before + 1:
            yield f"{lease.lease_id} does not know that it was preempted once more"


def _by_right(cluster: ClusterState, change: Preempting) -> Iterator[str]:
    victim, pending = cluster.leases.get(change.lease_id), cluster.pending.get(change.by)
    if victim is None or victim.preempted_by:
        yield f"{change.lease_id} is preempted and holds nothing, or is so already"
    elif pending is None:
        yield f"{change.lease_id} is preempted for {change.by}, which does not wait"
    elif pending.request.team == victim.request.team:
        if victim.request.priority >= pending.request.priority:
            yield f"{change.lease_id} is preempted for {change.by} of its team, which is no more urgent"
    elif (ledger := cluster.ledger) is not None and not cluster.preempting:
        # While others are ending, what is kept for those they end for counts as held.
        taker = ledger.of(pending.request)
        asked = 1000 * pending.request.gpus * pending.request.nodes
        if taker.held + asked > taker.guaranteed:
            yield f"{change.by} preempts {change.lease_id} beyond the guarantee of its team"
        if ledger.of(victim.request).held <= ledger.of(victim.request).guaranteed:
            yield f"{change.lease_id} is preempted although its team is inside its guarantee"
