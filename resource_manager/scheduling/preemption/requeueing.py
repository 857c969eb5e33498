"""What becomes of a preempted lease: its request waits again, or its GPUs stay closed until it ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from resource_manager.core.changes import Outcome, Preempting, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import IDLE, LIMITS, MAX_RUNTIME, OnIdle
from resource_manager.core.maintenance import is_window
from resource_manager.core.models import KEY_SEPARATOR, Lease
from resource_manager.core.runtimes import RAN, RESTARTS
from resource_manager.scheduling.queue.runtime_limits import PREEMPTED_AFTER, count_of


def taken_back(cluster: ClusterState, now: float) -> list[Preempting]:
    """Return the ends of the preemptions for requests that do not wait any more, or windows that are gone.

    A job that was told meanwhile ends, and its request waits again; the others run on.
    """
    windows = {window.preemptor for window in cluster.windows}
    return [
        Preempting(lease_id, lease.fencing_token, "", lease.preempt_until, now)
        for lease_id in sorted(cluster.preempting)
        if not (lease := cluster.leases[lease_id]).quarantined
        and lease.preempted_by not in cluster.pending
        and lease.preempted_by not in windows
        and (is_window(lease.preempted_by) or not lease.preempted_by.startswith(KEY_SEPARATOR))
    ]


def outcome_of(lease: Lease, outcome: str) -> str:
    """Return the outcome of a lease that a limit ended: that of the limit instead of that of a preemption.

    Of a failed one, too: what runs in a worker ends so. `IDLE` of one that waits again says that it does.
    """
    has_failed = outcome == Outcome.FAILED
    if lease.preempted_by == MAX_RUNTIME and (has_failed or outcome in _PREEMPTED):
        return Outcome.TIMED_OUT
    ends = has_failed and lease.request.on_idle != OnIdle.REQUEUE
    return Outcome.IDLE if lease.preempted_by == IDLE and (ends or outcome in _PREEMPTED) else outcome


def likely_outcome(lease: Lease) -> str:
    """Return the outcome of a lease that is being preempted, if its job ends in time.

    A command in a terminal does not wait again: nobody might be there to attend it.
    """
    is_attended = lease.request.labels.get("launcher") == "terminal"
    return outcome_of(lease, Outcome.EVICTED if is_attended else Outcome.PREEMPTED)


_PREEMPTED = (Outcome.PREEMPTED, Outcome.EVICTED)


def requeued(cluster: ClusterState, lease: Lease, outcome: str, now: float) -> list[Queued]:
    """Return the change that queues the request of a preempted lease again, at its old place in time.

    One that a limit ended waits at the end of the queue, so that others have their turn, and so does one
    whose preemption was taken back a while ago.
    """
    request, is_idle = lease.request, outcome == Outcome.IDLE and lease.request.on_idle == OnIdle.REQUEUE
    if not (is_idle or outcome == Outcome.PREEMPTED) or lease.preempt_until == math.inf:
        return []
    labels = {**request.labels, RESTARTS: str(restarts_of(request.labels) + 1)}
    labels[RAN] = str(count_of(labels, RAN) + max(int(now - lease.granted_at), 0))
    is_late = not lease.preempted_by and now > lease.preempt_until + request.ttl_s
    at_end = lease.preempted_by in LIMITS or is_late
    labels.pop(PREEMPTED_AFTER, None)
    if not at_end:
        labels[PREEMPTED_AFTER] = str(max(int(now - lease.arrived_at), 0))
    request = replace(request, labels=labels, preferred_node=lease.placement.node)
    if at_end:
        return [Queued(request, now, cluster.sequence + 1, now)]
    return [Queued(request, lease.arrived_at, lease.sequence, now)]


def restarts_of(labels: Mapping[str, str]) -> int:
    """Return how often the job of a lease with these labels was preempted."""
    return count_of(labels, RESTARTS)


def overdue(cluster: ClusterState, now: float, due: Collection[str]) -> list[Lease]:
    """Return the leases that are held beyond the end of their preemption, but for `due`."""
    return [
        lease
        for lease_id in sorted(cluster.preempting)
        if now > (lease := cluster.leases[lease_id]).preempt_until
        and not lease.quarantined
        and lease_id not in due
    ]
