"""What happens in a play of the queue: leases end and are taken, requests come, servers open to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from resource_manager.core.changes import GpuCleaned, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import avoided_until
from resource_manager.core.lease_limits import REQUEUE_AFTER
from resource_manager.core.models import Lease, Request
from resource_manager.scheduling import allocator
from resource_manager.scheduling.preemption.preempting import preemptions, preempts_from
from resource_manager.scheduling.preemption.requeueing import likely_outcome, requeued
from resource_manager.scheduling.queue.runtime_limits import at_limit, limit_of
from resource_manager.scheduling.reasons.announced_arrivals import Arrival
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_ARRIVALS = 100
"""Maximum number of announced requests, the next ones, that arrive in a play."""

MAX_DELAYS = 16
"""Maximum number of steps of a play for the ends of delays after which requests may preempt."""


def openings(cluster: ClusterState, now: float) -> Iterator[float]:
    """Yield when more may start: windows end, servers that failed are tried again, requests may preempt."""
    for window in cluster.windows:
        if opening := window.occurrence(now):
            yield opening[1]
    for lease_id, failed in cluster.failed_starts.items():
        for entry in failed if lease_id in cluster.pending else ():
            yield max(avoided_until(entry), now)
    if (ledger := cluster.ledger) is not None and ledger.rules.preemption:
        due = sorted({preempts_from(ledger, pending) for pending in cluster.pending.values()})
        due = [at for at in due if at > now]
        yield from due[:: -(len(due) // MAX_DELAYS + 1)]


def reopenings(
    cluster: ClusterState, ended: Iterable[Lease | None], now: float, at: float
) -> Iterator[tuple[float, float, None]]:
    """Yield, as events, when windows that come again are over on servers of leases that have ended by `at`.

    The first ends since `now` are among the openings. Numbers of windows order events of one time.
    """
    freed = {member.node for lease in ended if lease is not None for member in lease.members}
    for window in cluster.windows if freed else ():
        found = None if window.every_s is None else window.occurrence(at)
        if found and found != window.occurrence(now) and not freed.isdisjoint(window.servers):
            yield found[1], -0.5 - window.window_id, None


def requests_of(
    arrivals: Iterable[Arrival], draw: Callable[[], float] = lambda: 0.5
) -> Iterator[tuple[float, Lease | Request]]:
    """Yield the next announced requests with the times of their arrival, of a mapped task all at one time."""
    copies = (
        (at, announced.request.for_task(f"{announced.lease_id}/{number}"))
        for announced, at in ((arrival.announced, arrival.at(draw())) for arrival in arrivals)
        for number in range(max(announced.copies, 1))
    )
    return islice(copies, MAX_ARRIVALS)


def apply_event(cluster: ClusterState, entry: Lease | Request | None, at: float) -> Lease | None:
    """Apply the end of a lease, which is returned as it was, or queue a request; None: a server opens.

    A request that has come already is not queued. GPUs of watched nodes are clean at the end of their lease.
    The request of one that was preempted, or whose turn is over, waits again. One that was preempted has two
    ends, of which the first counts.
    """
    if isinstance(entry, Request):
        if entry.lease_id not in cluster.pending and entry.lease_id not in cluster.leases:
            cluster.apply(*allocator.enqueue(cluster, [entry], at))
        return None
    lease = None if entry is None else cluster.leases.get(entry.lease_id)
    if entry is None or lease is None or lease.fencing_token != entry.fencing_token:
        return None
    if not entry.preempted_by and at >= at_limit(cluster.ledger, entry):
        limit = limit_of(cluster.ledger, entry.request)[1]
        entry = replace(entry, preempted_by=limit, preempt_until=at)
    outcome = likely_outcome(entry) if entry.preempted_by else ""
    cluster.apply(Released(entry.lease_id, entry.fencing_token, at, outcome))
    for member in entry.members:
        if (state := cluster.by_name.get(member.node)) is not None and state.watched:
            for gpu_id in member.gpu_ids:
                cluster.apply(GpuCleaned(member.node, gpu_id, entry.fencing_token, at))
    for change in requeued(cluster, entry, outcome, at):
        if entry.preempted_by == REQUEUE_AFTER:
            # Its next turn is for the rest of its job: else turns without end would be all that is played.
            change = replace(change, request=replace(change.request, requeue_after_s=None))
        cluster.apply(change)
    return lease


def apply_cleaned(cluster: ClusterState, at: float) -> None:
    """Apply that all is clean that is being cleaned."""
    for entry in [entry for state in cluster.nodes for entry in state.cleaning.values()]:
        cluster.apply(GpuCleaned(entry.node, entry.gpu_id, entry.fencing_token, at))


def grant(cluster: ClusterState, current: SchedulingPass, ended: Iterable[Lease | None]) -> list[Lease]:
    """Apply the allocator's grants of that pass to the cluster in its trial; return their leases.

    Those for which leases were preempted that have `ended` come first; None is no lease.
    """
    granted: list[Lease] = []
    first = [*dict.fromkeys(lease.preempted_by for lease in ended if lease and lease.preempted_by)]
    for pending, members in allocator.dispatch(cluster, current, first):
        change = allocator.grant(cluster, pending.request, members, current.now)
        cluster.apply(change)
        granted.append(change.lease)
    return granted


def preempt(cluster: ClusterState, current: SchedulingPass) -> list[Lease]:
    """Apply the preemptions of that pass to the cluster in its trial; return the leases that end by them."""
    changes = preemptions(cluster, current)
    cluster.apply(*changes)
    return [cluster.leases[each.lease_id] for each in changes]
