"""Pure allocation steps: each reads the cluster and returns the changes to make, without applying them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    JobEnd,
    JobPlaced,
    MembersReleased,
    Outcome,
    Quarantined,
    Queued,
    Renewed,
    new_granted,
    new_released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import DRAINED, cleaning_milli, cleaning_on
from resource_manager.core.models import (
    MAX_RENEWAL_S,
    MILLI_PER_GPU,
    JobPlace,
    Lease,
    PendingRequest,
    Request,
    new_lease,
)
from resource_manager.core.names import name_of, short
from resource_manager.core.node_state import is_rounding_error
from resource_manager.errors import (
    CapacityError,
    DuplicateTaskError,
    InvalidRequestError,
    JobPlacedError,
    LeaseNotFoundError,
    NeverFitsError,
    OtherOwnerError,
    UnknownNodeError,
)
from resource_manager.scheduling.placement.gang_slots import Prospects, could_start
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.preemption.preempting import (
    held_back,
    preemption_of,
    preemptions,
    preemptors_of,
    starting_early,
)
from resource_manager.scheduling.preemption.requeueing import outcome_of, overdue, requeued, taken_back
from resource_manager.scheduling.preemption.victims import place_of
from resource_manager.scheduling.queue.backfill import Reservations
from resource_manager.scheduling.queue.giving_back import given_back
from resource_manager.scheduling.queue.quotas import may_start, stop_of
from resource_manager.scheduling.queue.runtime_limits import (
    lease_end,
    preempted_at_limit,
    reached,
    renewed_until,
)
from resource_manager.scheduling.queue.windows import closed_for, ending, is_restricted, place_now
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_REASON = 240
"""Maximum length of the reason of a release, which the history keeps."""

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
            for change in granted:
                cluster.apply(change)
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
        changes = _with_dispatch(cluster, queued, current, preempts=False)
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
    require_new_task(cluster, request)
    require_feasible(cluster, request)
    if not cluster.pending:
        granted = allocate(cluster, request, current)
        if granted:
            return granted
    return with_dispatch(cluster, enqueue(cluster, [request], current.now), current)


def release(
    cluster: ClusterState,
    lease_id: str,
    now: float,
    *,
    fencing_token: int | None = None,
    owner: str | None = None,
    outcome: str = "",
    job_end: JobEnd = JobEnd.UNKNOWN,
    reason: str = "",
    failed_nodes: Collection[str] = (),
) -> list[Change]:
    """Return the release of a lease, or by force the quarantine of one whose job may run.

    `reason` is a sentence for people, cut if it is long. `failed_nodes` are those on which its job did not
    start: the next request of that id avoids them. The request of a lease that was preempted, or whose job
    did not start, is pending again.

    Raises `LeaseNotFoundError` if there is none with that fencing token, `OtherOwnerError` if it is not that
    owner's, `JobPlacedError` if its job was placed and `job_end` does not say that it is gone, and
    `UnknownNodeError` for a failed node that is not in the inventory.
    """
    lease = _require_lease(cluster, lease_id, fencing_token, owner)
    outcome = outcome_of(lease, outcome)
    if lease.places and job_end in (JobEnd.UNKNOWN, JobEnd.FORCED):
        if job_end is JobEnd.UNKNOWN:
            raise _job_placed(lease)
        # What is left of a gang is nobody's to renew already.
        return [] if lease.revoked or lease.ranks else [Quarantined(lease_id, lease.fencing_token, now, True)]
    if lease.ranks:
        return [MembersReleased(lease_id, lease.fencing_token, lease.ranks, now, outcome)]
    for name in failed_nodes:
        cluster.node(name)
    released = new_released(
        lease_id,
        lease.fencing_token,
        now,
        outcome,
        reason=short(reason, MAX_REASON),
        failed_nodes=tuple(dict.fromkeys(failed_nodes)),
    )
    if outcome == Outcome.NOT_STARTED:
        return [released, *given_back(cluster, lease, now)]
    return [released, *requeued(cluster, lease, outcome, now)]


def release_members(
    cluster: ClusterState,
    lease_id: str,
    ranks: Collection[int],
    now: float,
    *,
    fencing_token: int,
    owner: str | None = None,
    outcome: str = "",
    job_end: JobEnd = JobEnd.UNKNOWN,
) -> list[Change]:
    """Return the release of these members of a lease, or of a remainder; all of them end it as a whole.

    Raises as `release` does, and `LeaseNotFoundError` if a member has ended already. Members cannot be
    released by force: the whole lease is.
    """
    lease = _require_lease(cluster, lease_id, fencing_token, owner)
    held = {rank for rank, _ in lease.ranked}
    if not ranks or not held.issuperset(ranks):
        raise LeaseNotFoundError(lease_id, fencing_token)
    if held.issubset(ranks):
        return release(cluster, lease_id, now, fencing_token=fencing_token, outcome=outcome, job_end=job_end)
    if lease.places and job_end in (JobEnd.UNKNOWN, JobEnd.FORCED):
        raise _job_placed(lease)
    return [MembersReleased(lease_id, fencing_token, tuple(sorted(set(ranks))), now, outcome)]


def place_job(
    cluster: ClusterState,
    lease_id: str,
    places: Sequence[JobPlace],
    now: float,
    *,
    fencing_token: int,
    owner: str | None = None,
) -> list[Change]:
    """Return the places of a lease's jobs, one a member, which are about to start there.

    Returns nothing if it has places already: whoever came first starts the jobs. Only walls may be told of
    jobs that were placed before they had any. Raises as `renew` does.
    """
    lease = _require_whole_lease(cluster, lease_id, fencing_token, owner)
    if len(places) != len(lease.members):
        text = "{places} must have one entry for each member, {}, got {}"
        raise InvalidRequestError(text, len(lease.members), len(places))
    if lease.places and not _tells_walls(lease.places, places):
        return []
    return [JobPlaced(lease_id, fencing_token, tuple(places), now)]


def _tells_walls(before: Sequence[JobPlace], after: Sequence[JobPlace]) -> bool:
    """Return whether these are the same places, and walls are told that were not known."""
    pairs = zip(before, after, strict=True)
    known = [old if old.walls else replace(old, walls=new.walls) for old, new in pairs]
    return list(after) == known != list(before)


def renew(
    cluster: ClusterState,
    lease_id: str,
    now: float,
    *,
    fencing_token: int | None = None,
    owner: str | None = None,
    checkpoint_at: float | None = None,
    for_s: float | None = None,
) -> list[Change]:
    """Return the renewal of a lease for its TTL from now, or for `for_s` if that is longer.

    `checkpoint_at` is when its job last saved what it did, if that is later than what is known. Raises as
    `release` does, and `InvalidRequestError` if `for_s` is not above 0 and at most `MAX_RENEWAL_S`.
    """
    if for_s is not None and not 0 < for_s <= MAX_RENEWAL_S:
        text = "{for_s} must be above 0 and at most {:g} (a day), got {}"
        raise InvalidRequestError(text, MAX_RENEWAL_S, for_s)
    lease = _require_whole_lease(cluster, lease_id, fencing_token, owner)
    life_s = max(lease.request.ttl_s, for_s or 0.0)
    ends_at = renewed_until(cluster.ledger, lease, now, life_s)
    saved = [at for at in (lease.checkpoint_at, checkpoint_at) if at is not None]
    return [Renewed(lease_id, lease.fencing_token, now, ends_at, max(saved, default=None))]


def preempt(
    cluster: ClusterState,
    lease_id: str,
    current: SchedulingPass,
    *,
    fencing_token: int | None = None,
    preemptor: str = "",
) -> list[Change]:
    """Return the preemption of a lease for a pending request; raises as `preemption_of` and `release`."""
    lease = _require_whole_lease(cluster, lease_id, fencing_token)
    return [preemption_of(cluster, lease, current, preemptor)]


def _require_whole_lease(
    cluster: ClusterState, lease_id: str, fencing_token: int | None, owner: str | None = None
) -> Lease:
    """Return the lease; a remainder or a revoked one has no life to restart, nor to end for another."""
    lease = _require_lease(cluster, lease_id, fencing_token, owner)
    if lease.ranks or lease.revoked:
        raise LeaseNotFoundError(lease_id, fencing_token)
    return lease


def _require_lease(
    cluster: ClusterState, lease_id: str, fencing_token: int | None, owner: str | None
) -> Lease:
    lease = cluster.leases.get(lease_id)
    # First the token: the holder of a lease that has ended must learn that, also where another took its id.
    if lease is None or fencing_token not in (None, lease.fencing_token):
        lease = None if fencing_token is None else cluster.holding(lease_id, fencing_token)
        if lease is None:
            raise LeaseNotFoundError(lease_id, fencing_token)
    if owner not in (None, lease.request.owner):
        raise OtherOwnerError(name_of(lease), lease.request.owner, owner)
    return lease


def _job_placed(lease: Lease) -> JobPlacedError:
    nodes = [member.node for member in lease.members]
    return JobPlacedError(lease.lease_id, name_of(lease), nodes, lease.places[0].launcher)


def expire(cluster: ClusterState, now: float) -> list[Change]:
    """Return the expiry, or the quarantine, of every lease whose TTL has passed.

    One whose job was placed is quarantined: its end is not known to be that of the job.
    A lease that is still held after the end of its preemption is quarantined. What still runs in a
    maintenance window that preempts is preempted, and so is what reached its longest runtime.
    """
    due = cluster.expired(now)
    if not (due or cluster.preempting or cluster.windows):  # as nearly always
        return []
    late = overdue(cluster, now, {lease.lease_id for lease in due}) if cluster.preempting else []
    windows = ending(cluster, now) if cluster.windows else []
    gone = {lease.lease_id for lease in due}
    return [
        *late,
        *(change for change in windows if change.lease_id not in gone),
        *(change for lease in due for change in _expiry(cluster, lease, now)),
    ]


def _expiry(cluster: ClusterState, lease: Lease, now: float) -> Sequence[Change]:
    if limit := reached(cluster.ledger, lease, now):
        return preempted_at_limit(cluster.ledger, lease, limit, now)
    kind = Quarantined if lease.request.quarantine or lease.places else Expired
    return [kind(lease.lease_id, lease.fencing_token, now)]


def cancel(
    cluster: ClusterState,
    lease_id: str,
    now: float,
    reason: str = "",
    *,
    owner: str | None = None,
    sequence: int | None = None,
) -> list[Change]:
    """Return the cancellation of a pending request.

    Raises `LeaseNotFoundError` if there is none (with that number in the order of arrival), and
    `OtherOwnerError` if it is not that owner's.
    """
    pending = cluster.pending.get(lease_id)
    if pending is not None and owner not in (None, pending.request.owner):
        raise OtherOwnerError(name_of(pending), pending.request.owner, owner)
    if pending is None or sequence not in (None, pending.sequence):
        raise LeaseNotFoundError(lease_id)
    return [Cancelled(lease_id, now, reason)]


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


def with_dispatch(cluster: ClusterState, changes: Sequence[Change], current: SchedulingPass) -> list[Change]:
    """Return the changes followed by the grants of pending requests that they make possible.

    Then follow preemptions for those that do not start, and the ends of those for requests that do not wait.
    """
    return _with_dispatch(cluster, changes, current, preempts=True)


def _with_dispatch(
    cluster: ClusterState,
    changes: Sequence[Change],
    current: SchedulingPass,
    *,
    preempts: bool,
) -> list[Change]:
    is_pending = cluster.pending or any(type(change) is Queued for change in changes)
    if not is_pending and not cluster.preempting:
        return list(changes)
    combined = list(changes)
    first = preemptors_of(cluster, changes) if cluster.preempting else ()
    with cluster.trial():
        for change in changes:
            cluster.apply(change)
        combined += _taken_back(cluster, current.now)
        for pending, members in dispatch(cluster, current, first):
            granted = grant(cluster, pending.request, members, current.now)
            cluster.apply(granted)
            combined.append(granted)
        combined += _taken_back(cluster, current.now)
        if preempts and cluster.teams.preemption and cluster.pending:
            combined += preemptions(cluster, current)
    return combined


def _taken_back(cluster: ClusterState, now: float) -> list[Change]:
    """Apply, and return, the ends of preemptions for requests that do not wait any more."""
    changes = taken_back(cluster, now) if cluster.preempting else []
    for change in changes:
        cluster.apply(change)
    return changes


def dispatch(
    cluster: ClusterState,
    current: SchedulingPass,
    first: Collection[str] = (),
) -> Iterator[tuple[PendingRequest, Members]]:
    """Yield the pending requests that start now, with their members; apply each grant before the next step.

    Those whose ids are in `first` come first: leases were preempted for them. What leases that are still
    ending have freed for others is held back.
    """
    if current.suspended is not None:
        return
    for lease_id in first:
        if pending := cluster.pending.get(lease_id):
            members = place_of(cluster, pending, current)
            if members is not None:
                yield pending, members
    if not cluster.preempting:
        yield from _dispatch(cluster, current, ())
        return
    yield from starting_early(cluster, current)
    with held_back(cluster, current) as waiting:
        yield from _dispatch(cluster, current, waiting)


def _dispatch(
    cluster: ClusterState, current: SchedulingPass, waiting: Collection[str]
) -> Iterator[tuple[PendingRequest, Members]]:
    """Yield the pending requests that start now, but for those `waiting` for preempted leases to end.

    The first request that does not fit blocks all behind it, unless the queue discipline backfills: then
    such requests get reservations as soon as a request behind them could start.
    """
    prospects = Prospects.of(cluster)
    planned: Reservations | None = None
    blocked: set[str] = set()
    too_large: set[tuple[object, ...]] = set()
    """Shapes that do not fit; nothing is freed during the pass."""
    for pending in current.order.starting(cluster, current.now):
        request = pending.request
        if request.lease_id in waiting or request.lease_id in cluster.leases:
            continue
        if cluster.ledger is not None and not may_start(cluster.ledger, request, blocked):
            continue
        restricted = is_restricted(cluster, request)
        members = None
        if restricted or (request.shape not in too_large and (planned is None or planned.may_start(request))):
            members = place_now(cluster, request, current)
            if members is not None and not current.admits(cluster, request, members, pending.queued_at):
                continue
            if members is not None and planned is not None:
                members = planned.without_delay(request, members)
            elif members is None and not restricted and _fits_nowhere(cluster, request):
                too_large.add(request.shape)
                if planned is not None:
                    planned.rule_out(request)
        if members is not None:
            yield pending, members
            continue
        if not (blocks_queue(cluster, request, current) if restricted else prospects.could_start(request)):
            continue  # it blocks nobody
        if current.order.backfill:
            if planned is None:
                planned = Reservations(cluster, current, prospects)
            planned.put_ahead(request)
            if planned.is_over():
                return
        elif cluster.ledger is None:
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


def require_new_task(cluster: ClusterState, request: Request) -> None:
    """Raise `DuplicateTaskError` if the task holds a lease or is pending."""
    if request.lease_id in cluster.leases:
        raise DuplicateTaskError(request.lease_id, "already holds a lease")
    if request.lease_id in cluster.pending:
        raise DuplicateTaskError(request.lease_id, "is already pending in the queue")


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
