"""Estimated starts of pending requests, by simulating the ends of leases, with a confidence."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from resource_manager.core.changes import GpuCleaned, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import avoided_until
from resource_manager.core.models import Lease, Request
from resource_manager.core.names import name_of
from resource_manager.core.refusal import (
    EndUnknown,
    Fact,
    Grounds,
    NoKnownEnd,
    NotEstimated,
    PriceUnknown,
    RefusalKind,
    TooFar,
)
from resource_manager.core.runtimes import Confidence, LearntRuntimes
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.gangs import could_start
from resource_manager.scheduling.reasons.capacity_grounds import (
    leases_in_the_way,
    no_capacity,
    unreleased_lease,
)
from resource_manager.scheduling.reasons.feasibility import standings
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_STEPS = 500
"""Maximum number of simulated lease ends; a request that starts later gets no estimate."""

CLEANING_S = 1.0
"""Assumed time until GPUs whose lease has ended are clean."""

OVERDUE_FRACTION = 0.1
"""Part of its age for which a task past its expected end is assumed to run on."""


@dataclass(frozen=True, slots=True)
class Start:
    """Estimated time and node of a request's start; `at` is None if unknown, on the grounds in `why`."""

    at: float | None
    node: str | None
    confidence: Confidence
    why: Grounds | Fact | None = None


UNKNOWN = Start(None, None, Confidence.POOR)
LATER = Start(None, None, Confidence.POOR, NotEstimated())


def estimate_starts(
    cluster: ClusterState,
    current: SchedulingPass,
    extra: Iterable[Request] = (),
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, Start]:
    """Estimate the start of every pending request, and of `extra` ones as if they were queued now.

    A lease is assumed to end when its runtime is over, and never if that is unknown: its TTL is renewed while
    the job runs and tells nothing about its end. Once `goes_on` returns False, the starts that are left
    are not estimated. The cluster is left unchanged. Times are seconds of the store's clock.
    """
    now = current.now
    starts: dict[str, Start] = {}
    endless: set[str] = set()
    too_far = is_cut = False
    ticket = count()
    with cluster.trial():
        for change in allocator.enqueue(cluster, extra, now):
            cluster.apply(change)
        if not cluster.pending:
            return starts
        ends: list[tuple[float, int, Confidence, str, int]] = []

        def expect_end(lease: Lease, at: float) -> None:
            end = None if lease.quarantined else expected_end(lease, at, cluster.runtimes)
            if end is None:
                endless.add(lease.lease_id)
            else:
                heapq.heappush(ends, (end[0], next(ticket), end[1], lease.lease_id, lease.fencing_token))

        for lease in cluster.leases.values():
            expect_end(lease, now)
        for window in cluster.windows:
            if opening := window.occurrence(now):
                heapq.heappush(ends, (opening[1], next(ticket), Confidence.GOOD, "", 0))
        for lease_id, failed in cluster.failed_starts.items():
            for entry in failed if lease_id in cluster.pending else ():
                heapq.heappush(ends, (max(avoided_until(entry), now), next(ticket), Confidence.GOOD, "", 0))
        at, confidence = now, Confidence.GOOD
        dirty = any(state.cleaning for state in cluster.nodes)
        for _ in range(MAX_STEPS):
            if is_cut := not goes_on():
                break
            for lease in _grant(cluster, replace(current, now=at)):
                starts[lease.lease_id] = Start(at, lease.placement.node, confidence)
                expect_end(lease, at)
            if cluster.pending and dirty:
                at, dirty = now + CLEANING_S, False
                _apply_cleaned(cluster, at)
                continue
            if not cluster.pending or not ends:
                break
            at, _, sure, lease_id, fencing_token = heapq.heappop(ends)
            confidence = min(confidence, sure)
            if lease_id:  # else a server opens to requests
                _apply_end(cluster, lease_id, fencing_token, at)
        else:
            too_far = True
        why: list[tuple[Request, Grounds | Fact | None]]
        if is_cut:
            why = [(entry.request, NotEstimated()) for entry in cluster.pending.values()]
        else:
            why = list(
                _why_unknown(cluster, replace(current, now=at, suspended=None), endless, too_far=too_far)
            )
    for request, found in why:  # without one: what the closed servers have now, not what they will have
        grounds = no_capacity(cluster, request) if found is None else found
        starts[request.lease_id] = Start(None, None, Confidence.POOR, grounds)
    return starts


def _apply_end(cluster: ClusterState, lease_id: str, fencing_token: int, at: float) -> None:
    """Apply the end of a lease, and on watched nodes that its GPUs are clean a moment later."""
    members = cluster.leases[lease_id].members
    cluster.apply(Released(lease_id, fencing_token, at))
    for member in members:
        if (state := cluster.by_name.get(member.node)) is not None and state.watched:
            for gpu_id in member.gpu_ids:
                cluster.apply(GpuCleaned(member.node, gpu_id, fencing_token, at))


def _apply_cleaned(cluster: ClusterState, at: float) -> None:
    """Apply that all is clean that is being cleaned."""
    for entry in [entry for state in cluster.nodes for entry in state.cleaning.values()]:
        cluster.apply(GpuCleaned(entry.node, entry.gpu_id, entry.fencing_token, at))


def expected_end(lease: Lease, now: float, runtimes: LearntRuntimes) -> tuple[float, Confidence] | None:
    """Return a lease's expected end, never before now, and its confidence; None if its runtime is unknown."""
    if lease.preempted_by:
        return max(lease.preempt_until, now), Confidence.GOOD
    runtime = runtimes.runtime_of(lease.request)
    if runtime is None:
        return None
    end = lease.granted_at + runtime.seconds
    if end > now:
        return end, runtime.confidence
    return now + max(OVERDUE_FRACTION * (now - lease.granted_at), 1.0), Confidence.POOR


def _why_unknown(
    cluster: ClusterState,
    current: SchedulingPass,
    endless: Collection[str],
    *,
    too_far: bool,
) -> Iterator[tuple[Request, Grounds | Fact | None]]:
    """Yield the requests still pending after all known lease ends, and why; None for closed servers."""
    in_the_way: dict[tuple[object, ...], Fact] = {}
    ahead: Grounds | Fact | None = None
    """Reason for which the first request that blocks the queue has no start."""
    for standing in standings(cluster, current):
        request = standing.entry.request
        why: Grounds | Fact | None
        match standing.refusal.kind:
            case RefusalKind.NEVER_FITS:
                why = standing.refusal
            case RefusalKind.MAINTENANCE:
                why = standing.refusal if cluster.windows else None
            case RefusalKind.NO_CAPACITY if not could_start(cluster, request):
                why = None
            case RefusalKind.PRICE:
                why = PriceUnknown()
            case _ if too_far:
                why = TooFar(MAX_STEPS)
            case RefusalKind.BEHIND_QUEUE:
                why = ahead
            case RefusalKind.AWAITING_RELEASE:
                why = unreleased_lease(cluster.nodes, request)
                ahead = ahead or why
            case _:
                if request.shape not in in_the_way:
                    in_the_way[request.shape] = _endless(cluster, request, endless)
                why = in_the_way[request.shape]
                ahead = ahead or why
        yield request, why


def _endless(cluster: ClusterState, request: Request, endless: Collection[str]) -> EndUnknown | NoKnownEnd:
    found = [lease for lease in leases_in_the_way(cluster, request) if lease.lease_id in endless]
    if not found:
        return NoKnownEnd()
    return EndUnknown(name_of(found[0]), len(found) - 1)


def _grant(cluster: ClusterState, current: SchedulingPass) -> list[Lease]:
    """Apply the allocator's grants of that pass to the cluster in its trial; return their leases."""
    granted: list[Lease] = []
    for pending, members in allocator.dispatch(cluster, current):
        change = allocator.grant(cluster, pending.request, members, current.now)
        cluster.apply(change)
        granted.append(change.lease)
    return granted
