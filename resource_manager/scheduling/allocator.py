"""Pure allocation steps: each reads the cluster and returns the changes to make, without applying them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from resource_manager.core.changes import (
    Change,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    Queued,
    new_granted,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import DRAINED, cleaning_milli, cleaning_on
from resource_manager.core.models import MILLI_PER_GPU, Request, new_lease
from resource_manager.core.node_state import is_rounding_error
from resource_manager.core.pending import PendingRequest
from resource_manager.errors import CapacityError, DuplicateTaskError, NeverFitsError, UnknownNodeError
from resource_manager.scheduling.placement.gang_slots import Prospects, could_start
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.preemption.preempting import (
    held_back,
    preemptions,
    preemptors_of,
    starting_early,
)
from resource_manager.scheduling.preemption.requeueing import taken_back
from resource_manager.scheduling.queue.backfill import Reservations
from resource_manager.scheduling.queue.quotas import as_guaranteed, may_start, stop_of, within_guarantee
from resource_manager.scheduling.queue.runtime_limits import lease_end
from resource_manager.scheduling.queue.windows import closed_for, is_restricted, place_now
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.scheduling_pass import SchedulingPass

CLOCK_JITTER_S = 1.0
"""Seconds by which two readings of a server's clock, estimated from its answers, may be out of order."""


def allocate(cluster: ClusterState, request: Request, current: SchedulingPass) -> list[Change]:
    """Return one `Granted`, or nothing if the request does not fit now or is not admitted.

    The queue is ignored: use `submit` for a request that must not overtake.
    """
    if cluster.ledger is not None and stop_of(cluster.ledger, request) is not None:
        return []
    members = place_now(cluster, request, current)
    if members is None or not current.admits(cluster, request, members, current.now):
        return []
    return [grant(cluster, request, members, current.now)]


def allocate_in_order(
    cluster: ClusterState, requests: Sequence[Request], current: SchedulingPass
) -> list[Change]:
    """Return grants for the requests that fit now without overtaking a pending one; none for the others.

    Includes the grants of pending requests that come before them in the queue. No lease is preempted for a
    request that does not wait.
    """
    if not cluster.pending and len(requests) == 1:
        return allocate(cluster, requests[0], current)
    if cluster.pending:
        return _allocate_beside_queue(cluster, requests, current)
    changes: list[Change] = []
    without_place: list[Request] = []
    with cluster.trial():
        for request in requests:
            # Grants only take capacity: where one request has no place, an equal one after it has none.
            if any(_is_equal(request, other) for other in without_place):
                continue
            granted = allocate(cluster, request, current)
            cluster.apply(*granted)
            changes += granted
            is_plain = not granted and request.lease_id not in cluster.failed_starts
            if is_plain and place_now(cluster, request, current) is None:
                without_place.append(request)
    return changes


def _is_equal(request: Request, other: Request) -> bool:
    """Return whether the requests differ in what matters to nobody but their owners."""
    return request.shape == other.shape and request == replace(
        other, lease_id=request.lease_id, labels=request.labels
    )


def _allocate_beside_queue(
    cluster: ClusterState, requests: Sequence[Request], current: SchedulingPass
) -> list[Change]:
    while True:
        new = {request.lease_id for request in requests}
        queued = enqueue(cluster, requests, current.now)
        changes = with_dispatch(cluster, queued, current, preempts=False)
        grants = [change for change in changes if type(change) is Granted]
        granted = new.intersection(change.lease.lease_id for change in grants)
        if not grants or granted == new:
            return list(grants)
        # What is refused does not wait, so it must not have a place in the queue before others either.
        requests = [request for request in requests if request.lease_id in granted]


def grant(cluster: ClusterState, request: Request, members: Members, now: float) -> Granted:
    """Return the grant of these placements, unchecked: `ClusterState.apply` refuses it if it does not fit."""
    pending = cluster.pending.get(request.lease_id) if cluster.pending else None
    return new_granted(
        new_lease(
            request,
            cluster.identified(members),
            cluster.last_fencing_token + 1,
            now,
            now + request.ttl_s
            if cluster.ledger is None and request.max_runtime_s is request.requeue_after_s is None
            else lease_end(cluster.ledger, request, now, now, request.ttl_s),
            None if pending is None else pending.queued_at,
            sequence=cluster.sequence + 1 if pending is None else pending.sequence,
        ),
        now,
    )


def enqueue(cluster: ClusterState, requests: Iterable[Request], now: float) -> list[Change]:
    """Return the changes that put the requests at the end of the queue, in that order.

    Estimates of a server's clock differ by milliseconds: within `CLOCK_JITTER_S` none is queued before those
    ahead of it.
    """
    queued_at = now
    if (last := cluster.pending.last) is not None and now < last.queued_at <= now + CLOCK_JITTER_S:
        queued_at = last.queued_at
    return [
        Queued(request, queued_at, sequence, now)
        for sequence, request in enumerate(requests, start=cluster.sequence + 1)
    ]


def submit(cluster: ClusterState, request: Request, current: SchedulingPass) -> list[Change]:
    """Return a grant if the request fits and is next in queue order, else a `Queued`.

    Raises `DuplicateTaskError` if the task already holds a lease or is pending, `UnknownNodeError` if it
    names an unknown node, and `NeverFitsError` if no node could ever satisfy the request.
    """
    if request.lease_id in cluster.leases:
        raise DuplicateTaskError(request.lease_id, "already holds a lease")
    if request.lease_id in cluster.pending:
        raise DuplicateTaskError(request.lease_id, "is already pending in the queue")
    require_feasible(cluster, request)
    if not cluster.pending:
        granted = allocate(cluster, request, current)
        if granted:
            return granted
    return with_dispatch(cluster, enqueue(cluster, [request], current.now), current)


def drain_gpu(cluster: ClusterState, node: str, gpu_id: int, now: float, reason: str = "") -> list[Change]:
    """Return the change after which the GPU takes no new leases until `resume_gpu`; its leases continue."""
    state = cluster.node(node)
    closed = state.closed_gpus.get(gpu_id)
    told = f"{DRAINED}; {reason}" if reason else DRAINED
    stop = closed is not None and closed.stop
    return [GpuClosed(node, gpu_id, state.gpu_uuids.get(gpu_id, ""), told, now, stop)]


def resume_gpu(cluster: ClusterState, node: str, gpu_id: int, now: float) -> list[Change]:
    """Return the changes after which the GPU is open and nothing of it is being cleaned, none if it is so."""
    state = cluster.node(node)
    changes: list[Change] = [
        GpuCleaned(node, entry.gpu_id, entry.fencing_token, now) for entry in cleaning_on(state, gpu_id)
    ]
    return [*changes, GpuOpened(node, gpu_id, now)] if gpu_id in state.closed_gpus else changes


def schedule_pending(cluster: ClusterState, current: SchedulingPass) -> list[Change]:
    """Return grants for pending requests that fit, in queue order."""
    return with_dispatch(cluster, [], current)


def with_dispatch(
    cluster: ClusterState, changes: Sequence[Change], current: SchedulingPass, *, preempts: bool = True
) -> list[Change]:
    """Return the changes followed by the grants of pending requests that they make possible.

    If it `preempts` then follow preemptions for those that do not start, and the ends of those for requests
    that do not wait.
    """
    is_pending = cluster.pending or any(type(change) is Queued for change in changes)
    if not is_pending and not cluster.preempting:
        return list(changes)
    combined = list(changes)
    first = preemptors_of(cluster, changes) if cluster.preempting else ()
    with cluster.trial():
        cluster.apply(*changes)
        combined += _taken_back(cluster, current.now)
        for pending, members in dispatch(cluster, current, first):
            granted = grant(cluster, pending.request, members, current.now)
            cluster.apply(granted)
            combined.append(granted)
        combined += _taken_back(cluster, current.now)
        if preempts and cluster.teams.preemption and cluster.pending:
            combined += preemptions(cluster, current)
    return combined


def _taken_back(cluster: ClusterState, now: float) -> Sequence[Change]:
    """Apply, and return, the ends of preemptions for requests that do not wait any more."""
    changes = taken_back(cluster, now) if cluster.preempting else []
    cluster.apply(*changes)
    return changes


def dispatch(
    cluster: ClusterState,
    current: SchedulingPass,
    first: Collection[str] = (),
) -> Iterator[tuple[PendingRequest, Members]]:
    """Yield the pending requests that start now, with their members; apply each grant before the next step.

    Those whose ids are in `first` come first: leases were preempted for them. What leases that are still
    ending have freed for others is held back, from those as well.
    """
    if current.suspended is not None:
        return
    if first or cluster.preempting:
        yield from starting_early(cluster, current, first)
    if not cluster.preempting:
        yield from _dispatch(cluster, current, ())
        return
    with held_back(cluster, current) as waiting:
        yield from _dispatch(cluster, current, waiting)


def _dispatch(
    cluster: ClusterState, current: SchedulingPass, waiting: Collection[str]
) -> Iterator[tuple[PendingRequest, Members]]:
    """Yield the pending requests that start now, but for those `waiting` for preempted leases to end.

    The first request that does not fit blocks all behind it, unless the queue discipline backfills: then
    such requests get reservations as soon as a request behind them could start.
    """
    prospects, ledger = Prospects.of(cluster), cluster.ledger
    may_be_restricted = bool(cluster.windows or cluster.failed_starts)
    planned: Reservations | None = None
    blocked: set[str] = set()
    too_large: set[tuple[object, ...]] = set()
    """Shapes that do not fit; nothing is freed during the pass."""
    for pending in current.order.starting(cluster, current.now):
        request = pending.request
        if request.lease_id in waiting or request.lease_id in cluster.leases:
            continue
        placed = waiting_as = request
        if ledger is not None:
            if not may_start(ledger, request, blocked):
                continue
            placed = waiting_as = within_guarantee(ledger, request)
            if blocked:  # only what its team is guaranteed lets it go on
                request = as_guaranteed(ledger, request)
                placed = within_guarantee(ledger, request)
        restricted = may_be_restricted and is_restricted(cluster, request)
        members = None
        if (restricted or placed.shape not in too_large) and (
            planned is None or planned.may_start(request, restricted=restricted)
        ):
            members = place_now(cluster, request, current)
            if members is not None and not current.admits(cluster, request, members, pending.queued_at):
                continue
            if members is not None and planned is not None:
                members = planned.without_delay(placed, members)
                if members and not current.admits(cluster, request, members, pending.queued_at):
                    continue  # another server has its own price
            elif members is None and not restricted and _fits_nowhere(cluster, placed):
                too_large.add(placed.shape)
                if planned is not None and placed.shape == request.shape:
                    planned.rule_out(request)
        if members is not None:
            yield pending, members
            continue
        if current.order.backfill:
            if planned is None:
                if not prospects.usable(waiting_as):
                    continue  # it blocks nobody
                planned = Reservations(cluster, current)
            planned.put_ahead(waiting_as)
            if planned.is_over():
                return
        elif not (blocks_queue(cluster, waiting_as, current) if restricted else prospects.usable(waiting_as)):
            continue
        elif ledger is None:
            return
        else:
            blocked.add(request.team)


def _fits_nowhere(cluster: ClusterState, request: Request) -> bool:
    """Return True if no node has room for a request that found no place, or not all nodes for a gang."""
    return request.nodes != 1 or next(cluster.candidates(request), None) is None


def blocks_queue(cluster: ClusterState, request: Request, current: SchedulingPass) -> bool:
    """Return True if a pending request that does not fit now blocks the queue behind it.

    It does not if no open node could ever fit it with its open GPUs: a request that only a drained server or
    a closed GPU could satisfy would otherwise stop the whole queue. Nor does one that only maintenance
    windows or its failed starts keep from starting, unless the queue backfills: then it has a reservation
    after them.
    """
    if current.order.backfill or not is_restricted(cluster, request):
        return could_start(cluster, request)
    with closed_for(cluster, request, current):
        return could_start(cluster, request)


def require_feasible(cluster: ClusterState, request: Request) -> None:
    """Raise `NeverFitsError` if the request fits no node even when empty, or `UnknownNodeError`."""
    for name in (request.preferred_node, request.required_node):
        if name is not None and name not in cluster.by_name:
            raise UnknownNodeError(name, cluster.by_name)
    if grounds := never_fits(cluster, request):
        raise NeverFitsError(grounds=grounds)


def check(cluster: ClusterState) -> None:
    """Raise `CapacityError` unless free and allocated capacity add up to the inventory on every node."""
    for state in cluster.nodes:
        held: dict[int, int] = dict.fromkeys(state.gpu_free, 0)
        for lease in state.leases.values():
            for member in lease.on(state.name):
                for gpu_id in state.gpu_ids_of(member):
                    held[gpu_id] = held.get(gpu_id, 0) + lease.request.gpu_milli
        for gpu_id, free in state.gpu_free.items():
            dirty = cleaning_milli(state, gpu_id) if state.cleaning else 0
            expected = 0 if gpu_id in state.closed_gpus else MILLI_PER_GPU - held[gpu_id] - dirty
            if free < 0 or free != expected:
                raise CapacityError(
                    f"GPU {gpu_id} of {state.name!r}: {free} milli free, {held[gpu_id]} allocated, "
                    f"{dirty} being cleaned"
                )
        for name, total in state.node.resources.items():
            used = sum(
                lease.request.resources.get(name, 0)
                for lease in state.leases.values()
                for _ in lease.on(state.name)
            )
            difference = state.free[name] + used - total
            if difference and not is_rounding_error(difference, total):
                raise CapacityError(f"{name} of {state.name!r}: {state.free[name]} free, {used} allocated")
