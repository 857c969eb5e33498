"""Preemption as changes: leases that end for a request, what is kept for it, and what becomes of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from resource_manager.core.changes import Change, Expired, Granted, Preempting, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import preemptor_in_words
from resource_manager.core.models import KEY_SEPARATOR, MILLI_PER_GPU, Lease, Placement, Request
from resource_manager.core.name_lookup import name_in
from resource_manager.core.names import name_of
from resource_manager.core.pending import Kind, PendingRequest, kind_of
from resource_manager.core.refusal import Grounds, RefusalKind, StillHeld, WaitsForEnds
from resource_manager.core.team_ledger import TeamLedger
from resource_manager.errors import InvalidRequestError, NotPreemptibleError
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.preemption.turns import MAX_IN_VAIN, MAX_TEAMS, kinds_in_turn
from resource_manager.scheduling.preemption.victim_bounds import VictimBounds
from resource_manager.scheduling.preemption.victim_right import Planned
from resource_manager.scheduling.preemption.victims import (
    find_victims,
    place_by_right,
    place_of,
    takes_of_others,
    ways_after,
)
from resource_manager.scheduling.queue.quotas import StopKind, stop_of
from resource_manager.scheduling.queue.runtime_limits import PREEMPTED_AFTER, count_of
from resource_manager.scheduling.queue.windows import is_of_agents, is_restricted
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_SEARCHES = 32
"""Maximum number of requests for which victims are found in one pass over the queue."""

STUCK_AFTER_S = 60.0
"""Time from the end of its preemption after which a quarantined lease is stuck: nobody counts on its end."""


def would_preempt(cluster: ClusterState, request: Request, current: SchedulingPass) -> list[Lease]:
    """Return the leases that the request would preempt after its delay; empty if none, or none more."""
    if cluster.ledger is None or not cluster.ledger.rules.preemption:
        return []
    pending = cluster.pending.get(request.lease_id) or PendingRequest(
        request, current.now, cluster.sequence + 1
    )
    with cluster.trial():
        plan = _plan(cluster, current)
        if request.lease_id in plan.to_come:
            return []
        victims = find_victims(cluster, pending, current, plan)
        return victims if _starts_after(cluster, pending, victims, plan, current) else []


def ending_for(cluster: ClusterState, lease_id: str) -> list[Lease]:
    """Return the leases that are being preempted for that request, the first to end first."""
    return [lease for lease in _ending(cluster) if lease.preempted_by == lease_id]


def awaiting_release(cluster: ClusterState, lease_id: str, now: float) -> Grounds | None:
    """Return the refusal of a request that waits for leases preempted for it, or None."""
    ending = ending_for(cluster, lease_id)
    if not ending:
        return None
    why: StillHeld | WaitsForEnds
    if stuck := next((lease for lease in ending if lease.quarantined), None):
        why = StillHeld(name_of(stuck), stuck.placement.node)
    else:
        left_s = max(ending[-1].preempt_until - now, 0.0)
        why = WaitsForEnds(name_of(ending[0]), ending[0].placement.node, len(ending) - 1, left_s)
    return Grounds(RefusalKind.AWAITING_RELEASE, (why,))


# ---- the changes that it takes ----


def preemption_of(
    cluster: ClusterState,
    lease: Lease,
    current: SchedulingPass,
    preemptor: str = "",
) -> Preempting:
    """Return the preemption of one lease that a person decides on, for the pending request `preemptor`.

    Without one it is for the first in the queue that waits for what this lease holds. Rules of teams do not
    matter, but `preemptible` does. Raises `NotPreemptibleError` if it must not, or need not, be preempted.
    """
    lease_id, name = lease.lease_id, name_of(lease)
    if lease.preempted_by:
        winner = name_in(cluster, preemptor_in_words(lease.preempted_by))
        raise NotPreemptibleError(f"{name} is being preempted for {winner} already")
    if not lease.request.preemptible:
        raise NotPreemptibleError(f"{name} is not preemptible, as it asked: stop its job instead")
    if lease.quarantined and not is_of_agents(lease):
        text = f"{name} is quarantined, and nobody tells its job: release it once that is known to be gone"
        raise NotPreemptibleError(text)
    if preemptor and preemptor not in cluster.pending:
        raise InvalidRequestError("{preemptor} must be a pending request, got {!r}", preemptor)
    with cluster.trial():
        served = _plan(cluster, current).to_come
        queue = current.order.starting(cluster, current.now)
        if preemptor:
            queue = [] if preemptor in served else [cluster.pending[preemptor]]
        stuck = [
            pending
            for pending in queue
            if pending.request.lease_id not in served and place_of(cluster, pending, current) is None
        ]
        cluster.suppose_ended(lease)
        for pending in stuck[:MAX_SEARCHES]:
            if place_of(cluster, pending, current) is not None:
                until = current.now + lease.request.preempt_grace_s
                winner = pending.request.lease_id
                return Preempting(lease_id, lease.fencing_token, winner, until, current.now, by_operator=True)
    if preemptor:
        raise NotPreemptibleError(
            f"{name_in(cluster, preemptor)} would not start if {name} ended, or need not wait for it"
        )
    nobody = "nobody" if len(stuck) <= MAX_SEARCHES else f"none of the first {MAX_SEARCHES} in the queue"
    raise NotPreemptibleError(f"{nobody} waits for what {name} holds: stop its job instead")


def preemptions(cluster: ClusterState, current: SchedulingPass) -> list[Preempting]:
    """Return the preemptions for pending requests that did not start, in queue order.

    The cluster must be in a trial; all grants that are possible must have been applied to it.
    """
    ledger, now = cluster.ledger, current.now
    if ledger is None or current.suspended is not None:
        return []
    changes: list[Preempting] = []
    with cluster.trial():
        plan = _plan(cluster, current)
        kinds = _with_prospects(cluster, plan, now)
        turn = kinds_in_turn(cluster, kinds, current)
        in_vain: Counter[tuple[Kind, bool]] = Counter()
        searches: Counter[str] = Counter()
        found = 0
        for pending in current.order.starting(cluster, current.now) if kinds else ():
            request, team = pending.request, pending.request.team
            own_kind = kind_of(request)
            if own_kind not in kinds or request.lease_id in plan.to_come:
                continue
            is_over = searches[team] >= MAX_IN_VAIN or searches.total() >= MAX_IN_VAIN * MAX_TEAMS
            if is_over and own_kind not in turn:
                continue
            if now < preempts_from(ledger, pending):
                continue
            # Windows, failed starts and prices speak of one request, and not of all of its kind.
            is_alone = current.limits.admission is not None or is_restricted(cluster, request)
            so_far = in_vain[own_kind, is_alone]
            if so_far == (MAX_IN_VAIN if is_alone else 1) or _is_too_long(ledger, request):
                continue
            bounds = VictimBounds.of(cluster, now)
            victims: list[Lease] = []
            kind = (*own_kind, current.policy)
            if is_alone or not bounds.is_in_vain(kind):
                victims = find_victims(cluster, pending, current, plan)
            waits = bool(victims) and not _starts_after(cluster, pending, victims, plan, current)
            if waits or not victims:
                in_vain[own_kind, is_alone] += 1
                searches[team] += own_kind not in turn
                if not (waits or is_alone):
                    bounds.was_in_vain(kind)
                continue
            for lease in victims:
                until = now + lease.request.preempt_grace_s
                change = Preempting(lease.lease_id, lease.fencing_token, request.lease_id, until, now)
                changes.append(change)
                cluster.suppose_ended(lease)
                plan.ending.append(replace(lease, preempted_by=request.lease_id))
            plan.add(_place(cluster, pending, current))
            found += 1
            if found == MAX_SEARCHES:
                break
    return changes


def preempts_from(ledger: TeamLedger, pending: PendingRequest) -> float:
    """Return the time from which on a pending request may preempt: once it has waited for free capacity.

    One that was preempted itself waits so long again, for all that its place in the queue is the old one.
    """
    delay_s = pending.request.preemption_delay_s
    since = pending.queued_at + count_of(pending.request.labels, PREEMPTED_AFTER)
    return since + (ledger.rules.preemption_delay_s if delay_s is None else delay_s)


def _is_too_long(ledger: TeamLedger, request: Request) -> bool:
    stop = stop_of(ledger, request)
    return stop is not None and stop.kind is StopKind.RUNTIME


def _with_prospects(cluster: ClusterState, plan: Planned, now: float) -> set[Kind]:
    """Return the kinds of pending requests that still wait for victims, and for which there may be any."""
    bounds = VictimBounds.of(cluster, now)
    found: set[Kind] = set()
    for kind, requests in cluster.pending.kinds.items():
        first = next((request for name, request in requests.items() if name not in plan.to_come), None)
        if first is not None and not bounds.exclude(kind, first, plan):
            found.add(kind)
    return found


def _plan(cluster: ClusterState, current: SchedulingPass) -> Planned:
    """Apply the ends of the preempted leases, and place those they end for; return what those are to get."""
    plan = Planned(cluster, _ending(cluster, current.now - STUCK_AFTER_S))
    for lease in plan.ending:
        cluster.suppose_ended(lease)
    for by in dict.fromkeys(lease.preempted_by for lease in plan.ending):
        if pending := cluster.pending.get(by):
            plan.add(_place(cluster, pending, current))
    return plan


def _starts_after(
    cluster: ClusterState,
    pending: PendingRequest,
    victims: Sequence[Lease],
    plan: Planned,
    current: SchedulingPass,
) -> bool:
    """Return True if the request may start as soon as its victims have ended, whatever ends for others later.

    Nothing is kept for it between their ends and those: they would start again, and be preempted again.
    """
    others = [lease for lease in plan.ending if lease.preempted_by != pending.lease_id]
    if not others:
        return True
    with cluster.trial():
        for lease in (*victims, *plan.to_come.values()):
            cluster.suppose_ended(lease)
        with cluster.reserved(others):
            parts = _free_parts(cluster, plan.to_come.values(), current.now)
            with cluster.reserved(parts):
                return any(place_of(cluster, way, current) for way in ways_after(cluster, pending, victims))


def _ending(cluster: ClusterState, since: float = -math.inf) -> list[Lease]:
    """Return the leases that are being preempted, the first to end first, but for those stuck since then."""
    ending = (cluster.leases[lease_id] for lease_id in cluster.preempting)
    return sorted(
        (lease for lease in ending if not lease.quarantined or lease.preempt_until >= since),
        key=lambda lease: (lease.preempt_until, lease.preempted_by, lease.lease_id),
    )


def starting_early(
    cluster: ClusterState, current: SchedulingPass, first: Collection[str]
) -> Iterator[tuple[PendingRequest, Members]]:
    """Yield those for whom leases ended (`first`) or are ending and who fit already, with their members.

    None takes what another of them is to get, nor by right GPUs of types outside its team's guarantee. Apply
    each grant before the next step.
    """
    for by in dict.fromkeys((*first, *(lease.preempted_by for lease in _ending(cluster)))):
        pending = cluster.pending.get(by)
        if pending is None or place_of(cluster, pending, current) is None:
            continue
        with cluster.trial():
            before = _plan(cluster, current).to_come
        as_planned = pending
        if by in before and takes_of_others(pending.request, ending_for(cluster, by)):
            as_planned = replace(pending, request=before[by].request)
        others = [lease for name, lease in before.items() if name != by]
        with cluster.trial():
            to_come = _place(cluster, as_planned, current)
            after = {} if to_come is None else _plan(cluster, current).to_come
        if to_come is None or not after.keys() >= {lease.lease_id for lease in others}:
            with cluster.reserved(_free_parts(cluster, others, current.now)), cluster.trial():
                to_come = _place(cluster, as_planned, current)
        if to_come is not None:
            yield pending, to_come.members


def _place(cluster: ClusterState, pending: PendingRequest, current: SchedulingPass) -> Lease | None:
    """Grant the request in the trial that the cluster is in; return its lease, None if it does not fit."""
    placed = place_by_right(cluster, pending, current)
    if placed is None:
        return None
    # Quarantined, since nobody can be given what is only planned.
    lease = Lease(*placed, cluster.last_fencing_token + 1, current.now, quarantined=True)
    cluster.apply(Granted(lease, current.now))
    return lease


@contextmanager
def held_back(cluster: ClusterState, current: SchedulingPass) -> Iterator[Collection[str]]:
    """Reserve what preempted leases have freed so far for those they ended for; yield the ids of those."""
    with cluster.trial():
        planned = _plan(cluster, current).to_come
    with cluster.reserved(_free_parts(cluster, planned.values(), current.now)):
        yield planned.keys()


def kept_for(lease_id: str) -> str:
    """Return the id of the request for which a lease of `held_back` keeps its place; else the id itself."""
    return lease_id.partition(KEY_SEPARATOR)[0]


def _free_parts(cluster: ClusterState, planned: Iterable[Lease], now: float) -> list[Lease]:
    """Return leases of what is free now of those planned, which begin once all that ends for them has ended.

    Backfill counts on their ends, as on those of all leases.
    """
    parts: list[Lease] = []
    for lease in planned:
        ending = ending_for(cluster, lease.lease_id)
        begin = max([now, *(each.preempt_until for each in ending)])
        runtime_s = cluster.runtimes.runtime_of(lease.request)  # its own id is of no class
        request = replace(lease.request, nodes=1, expected_runtime_s=runtime_s)
        needed, to_end = _milli_by_gpu(cluster, [lease]), _milli_by_gpu(cluster, ending)
        for rank, member in enumerate(lease.members):
            name = f"{lease.lease_id}{KEY_SEPARATOR}reserved {rank}"
            for part in _free_of(cluster, replace(request, lease_id=name), member, needed, to_end):
                parts.append(Lease(*part, 0, begin))
    return parts


def _milli_by_gpu(cluster: ClusterState, leases: Iterable[Lease]) -> Counter[tuple[str, int]]:
    """Return the thousandths that leases have, or are to have, of each GPU, by node and id."""
    milli: Counter[tuple[str, int]] = Counter()
    for lease in leases:
        for member in lease.members:
            for gpu_id in cluster.by_name[member.node].gpu_ids_of(member):
                milli[member.node, gpu_id] += lease.request.gpu_milli
    return milli


def _free_of(
    cluster: ClusterState,
    request: Request,
    member: Placement,
    needed: Counter[tuple[str, int]],
    to_end: Counter[tuple[str, int]],
) -> Iterator[tuple[Request, tuple[Placement]]]:
    """Yield what is free now of a member's place; the rest is held by leases that are ending.

    Of a GPU that is free in part it is what those that end for the lease will not free, kept for its first
    member there: `needed` and `to_end` are the thousandths of its place, and of what ends for it.
    """
    state, whole = cluster.by_name[member.node], []
    for gpu_id in member.gpu_ids:
        key, free_milli = (member.node, gpu_id), state.gpu_free.get(gpu_id, 0)
        if free_milli >= needed[key]:
            whole.append(gpu_id)
        elif (part_milli := min(free_milli, needed[key] - to_end[key])) > 0:
            to_end[key] = needed[key]
            name = f"{request.lease_id} {gpu_id}"
            part = replace(request, lease_id=name, gpus=1, gpu_milli=part_milli, resources={})
            yield part, (Placement(member.node, (gpu_id,)),)
    ending = [
        lease.request.resources
        for lease in state.leases.values()
        if lease.preempted_by
        for _ in lease.on(state.name)
    ]
    amounts = {
        name: max(amount - sum(held.get(name, 0) for held in ending), 0)
        for name, amount in request.resources.items()
    }
    if whole or any(amounts.values()):
        gpu_milli = request.gpu_milli if whole else MILLI_PER_GPU
        part = replace(request, gpus=len(whole), gpu_milli=gpu_milli, resources=amounts)
        yield part, (Placement(member.node, tuple(whole)),)


def preemptors_of(cluster: ClusterState, changes: Sequence[Change]) -> list[str]:
    """Return the ids of the requests for which the leases that these changes end were preempted."""
    ended = (
        cluster.leases[change.lease_id].preempted_by
        for change in changes
        if isinstance(change, Released | Expired) and change.lease_id in cluster.preempting
    )
    return list(dict.fromkeys(ended))
