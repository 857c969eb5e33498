"""Explanations why a request is not granted now: one refusal, and a verdict for each server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from resource_manager.core import fit
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import withheld
from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.name_lookup import name_in
from resource_manager.core.node_state import NodeState
from resource_manager.core.pending import PendingRequest
from resource_manager.core.refusal import (
    Ahead,
    BeyondPass,
    Fact,
    Grounds,
    HeldForAhead,
    MayStartAnyTime,
    NextPass,
    PriceNotCovered,
    RefusalKind,
    ServerShort,
    WouldDelay,
    misconfigured,
)
from resource_manager.core.server_facts import IsSilent, LeftInventory, NoAddress
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.gangs import fitting_node
from resource_manager.scheduling.placement.policies import fault_of
from resource_manager.scheduling.preemption.preempting import awaiting_release, held_back, kept_for
from resource_manager.scheduling.queue import quotas
from resource_manager.scheduling.queue.backfill import MAX_AHEAD, Reservations
from resource_manager.scheduling.queue.windows import Outlook, closed_for, place_now, reach_of
from resource_manager.scheduling.reasons.capacity_grounds import (
    closure_of,
    free_on,
    is_by_gpus,
    leases_in_the_way,
    most_free,
    never_fits,
    no_capacity,
)
from resource_manager.scheduling.scheduling_pass import SchedulingPass

SHORTEST_RUN_S = 0.001
"""A request that could not even start with this runtime is not helped by stating one."""

_Waiting = tuple[int, Request, int]
"""Position of a request that waits, and the mask of the nodes that it could use."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Position of a pending request in queue order, from 1, and the refusal that says why it is pending."""

    position: int
    entry: PendingRequest
    refusal: Grounds


def standings(
    cluster: ClusterState,
    current: SchedulingPass,
    *,
    only: Collection[str] | None = None,
) -> Iterator[Standing]:
    """Yield the standing of every pending request, or of `only` those task ids, in queue order.

    Do not change the cluster while iterating.
    """
    if cluster.preempting:
        with held_back(cluster, current) as waiting:
            yield from list(_standings(cluster, current, only, waiting))
    else:
        yield from _standings(cluster, current, only)


def _standings(
    cluster: ClusterState,
    current: SchedulingPass,
    only: Collection[str] | None,
    waiting: Collection[str] = (),
) -> Iterator[Standing]:
    reasons = _Reasons(cluster, current, waiting)
    for position, entry in enumerate(current.order(cluster, current.now), 1):
        if only is None or entry.lease_id in only:
            yield Standing(position, entry, reasons.of(entry))
        reasons.advance(position, entry)


def refusals_of(
    cluster: ClusterState,
    requests: Iterable[Request],
    current: SchedulingPass,
) -> dict[str, Grounds]:
    """Return the refusal of each request by task id, as if it was queued now; the cluster is unchanged.

    A request whose id has a lease by now could start.
    """
    asked = {request.lease_id: request for request in requests}
    found = {
        lease_id: Grounds(RefusalKind.BEHIND_QUEUE, (NextPass(first=False, waits=False),), request)
        for lease_id, request in asked.items()
        if lease_id in cluster.leases
    }
    new = [
        request
        for lease_id, request in asked.items()
        if lease_id not in cluster.pending and lease_id not in found
    ]
    with cluster.trial():
        cluster.apply(*allocator.enqueue(cluster, new, current.now))
        for standing in standings(cluster, current, only=asked):
            found[standing.entry.lease_id] = standing.refusal
    for request in new:
        refusal = found[request.lease_id]
        facts = (replace(fact, waits=False) if isinstance(fact, NextPass) else fact for fact in refusal.facts)
        found[request.lease_id] = replace(refusal, facts=tuple(facts))
    return found


class _Reasons:
    """Refusals of pending requests, computed one after the other from the head of the queue."""

    def __init__(
        self,
        cluster: ClusterState,
        current: SchedulingPass,
        waiting: Collection[str],
    ) -> None:
        self._cluster = cluster
        self._current = current
        self._served = waiting
        """Ids of the requests for which what others free is held back: they are ahead of nobody."""
        self._ahead: tuple[int, Request] | None = None
        """Position and request of the first one passed that blocks all behind it."""
        self._blocked: set[str] = set()
        """Without backfill, the teams of all that block."""
        self._reservations: Reservations | None = None
        self._outlook = Outlook(cluster, current)
        self._waiting: list[_Waiting] = []
        """With backfill, the requests passed that wait, in order."""
        self._rivals: dict[int, list[_Waiting]] = {}
        """The first of them by the nodes that they could use."""
        self._looked_at = 0
        """How many of them have a reservation, or hold back what they could use."""
        self._reserved: list[Request] = []
        self._holding: list[_Waiting] = []
        self._nodes: dict[tuple[object, ...], NodeState | None] = {}
        self._no_capacity: dict[tuple[object, ...], Grounds] = {}

    def advance(self, position: int, entry: PendingRequest) -> None:
        """Advance to the requests behind this one."""
        entry = self._placed(entry)
        request = entry.request
        ledger = self._cluster.ledger
        is_stopped = ledger is not None and quotas.stop_of(ledger, request) is not None
        if request.lease_id in self._served or is_stopped:
            return
        usable = self._outlook.usable(request) if self._current.order.backfill else -1
        if not usable:
            return  # it never starts, and is ahead of nobody
        if self._ahead is None:
            if self._blocks(request, request):
                self._ahead = (position, request)
                self._blocked.add(request.team)
        elif not self._current.order.backfill:
            if (passing := self._passing(request)) is not None and self._blocks(passing, request):
                self._blocked.add(request.team)
            return
        elif self._node(request) is None:
            if not allocator.blocks_queue(self._cluster, request, self._current):
                return
        elif self._by_price(entry):
            return
        if self._ahead is not None:
            self._waiting.append((position, request, usable))
            rivals = self._rivals.setdefault(usable, [])
            if len(rivals) < MAX_AHEAD:
                rivals.append(self._waiting[-1])

    def of(self, entry: PendingRequest) -> Grounds:
        asked, entry = entry.request, self._placed(entry)
        request = entry.request
        node = self._node(request)
        if node is None and (never := never_fits(self._cluster, asked)):
            return never
        if self._current.suspended is not None:
            return self._current.suspended
        if self._cluster.preempting and (
            waits := awaiting_release(self._cluster, request.lease_id, self._current.now)
        ):
            return waits
        if node is None:
            if stopped := quotas.quota_refusal(self._cluster, request) or self._by_types(asked, request):
                return stopped
            key = self._key(request)
            if key not in self._no_capacity:
                with closed_for(self._cluster, request, self._current):
                    self._no_capacity[key] = no_capacity(self._cluster, request)
            return self._no_capacity[key]
        if stopped := quotas.quota_refusal(self._cluster, request) or self._by_price(entry):
            return stopped
        return misconfigured(fault) if (fault := self._fault(request)) else self._behind(request, node)

    def _placed(self, entry: PendingRequest) -> PendingRequest:
        """Return the entry with its request as it may be placed."""
        request = quotas.within_guarantee(self._cluster.ledger, entry.request)
        return entry if request is entry.request else replace(entry, request=request)

    def _by_types(self, request: Request, placed: Request) -> Grounds | None:
        """Return the refusal of a request that only fits outside the types on which it may be placed."""
        ledger = self._cluster.ledger
        if placed is request or ledger is None or not never_fits(self._cluster, placed):
            return None
        nodes = (state.node for state in self._cluster.nodes if fit.could_ever_fit(state.node, request))
        types = {gpu.gpu_type for node in nodes for gpu in node.gpus}
        return quotas.type_refusal(ledger, request, types.difference(placed.gpu_types))

    def _fault(self, request: Request) -> str:
        """Return why the policy has no place for a request that fits."""
        if (fault := fault_of(self._current.policy)) is None:
            return ""
        with closed_for(self._cluster, request, self._current):
            return fault(self._cluster, request)

    def _node(self, request: Request) -> NodeState | None:
        """Return a node that the request fits now, or None."""
        key = self._key(request)
        if key not in self._nodes:
            with closed_for(self._cluster, request, self._current):
                self._nodes[key] = fitting_node(self._cluster, request)
        return self._nodes[key]

    def _key(self, request: Request) -> tuple[object, ...]:
        """Return what decides where the request fits now.

        That is its shape, how far it reaches into windows, and the request itself if its start has failed.
        """
        shape = request.shape
        if request.lease_id in self._cluster.failed_starts:
            shape = (*shape, request.lease_id)
        if not self._cluster.windows:
            return shape
        return (*shape, reach_of(self._cluster, request, self._current.limits.maintenance_guard_s))

    def _by_price(self, entry: PendingRequest) -> Grounds | None:
        admission, request = self._current.limits.admission, entry.request
        if admission is None or request.utility is None:
            return None
        members = place_now(self._cluster, request, self._current)
        ways = [members]
        if members is not None and self._ahead is not None and self._current.order.backfill:
            ways.append(self._settled().without_delay(request, members))  # another server has its own price
        for way in ways:
            if not way:
                break
            quote = admission.quote(self._cluster, request, way, entry.queued_at, self._current.now)
            if not quote.covered:
                over = PriceNotCovered(quote.utility or 0.0, quote.price or 0.0, way[0].node, len(way) - 1)
                return Grounds(RefusalKind.PRICE, (over,), request)
        return None

    def _behind(self, request: Request, node: NodeState) -> Grounds:
        if self._ahead is None:
            why: Fact = NextPass(first=True)
        elif self._current.order.backfill:
            why = self._delay(request, node)
        elif (passing := self._passing(request)) is not None and self._node(passing) is not None:
            why = NextPass(first=False)
        else:
            ahead = self._ahead[1]
            why = HeldForAhead(self._who(*self._ahead), node.could_fit(ahead), self._current.order.rule)
        return Grounds(RefusalKind.BEHIND_QUEUE, (free_on(node, request), why), request)

    def _blocks(self, placed: Request, request: Request) -> bool:
        """Return whether the request, which may be placed like that, is stuck and blocks those behind."""
        is_stuck = self._node(placed) is None or self._fault(placed)
        return bool(is_stuck) and allocator.blocks_queue(self._cluster, request, self._current)

    def _passing(self, request: Request) -> Request | None:
        """Return the request as it goes on behind those that block, inside its guarantee, or None."""
        if (ledger := self._cluster.ledger) is None or not quotas.passes(ledger, request, self._blocked):
            return None
        return quotas.as_guaranteed(ledger, request)

    def _who(self, position: int, ahead: Request) -> Ahead:
        name = name_in(self._cluster, ahead.lease_id)
        return Ahead(name, position, ahead, is_by_gpus(self._cluster, ahead))

    def _delay(self, request: Request, node: NodeState) -> Fact:
        """Return why backfill does not start the request now, by the same steps as `allocator.dispatch`."""
        masks = self._outlook.waits_for(request)
        rivals = sorted((each for mask in masks for each in self._rivals.get(mask, ())), key=itemgetter(0))
        if len(rivals) >= MAX_AHEAD:
            return BeyondPass(self._who(*rivals[MAX_AHEAD - 1][:2]), MAX_AHEAD)
        reservations = self._settled()
        members = place_now(self._cluster, request, self._current)
        if members is not None and reservations.without_delay(request, members):
            return NextPass(first=False)
        for position, ahead, usable in self._holding:
            if usable >> node.index & 1:
                return self._any_time(self._who(position, ahead))
        delayed = (each[:2] for each in self._waiting if each[2] >> node.index & 1)
        assert self._ahead is not None
        is_unknown = False
        if members is not None and self._cluster.runtimes.runtime_of(request) is None:
            brief = replace(request, expected_runtime_s=SHORTEST_RUN_S)
            is_unknown = reservations.without_delay(brief, members) is not None
        return WouldDelay(self._who(*next(delayed, self._ahead)), is_unknown)

    def _settled(self) -> Reservations:
        """Return the reservations of those passed that wait."""
        if self._reservations is None:
            self._reservations = Reservations(self._cluster, self._current)
        for each in self._waiting[self._looked_at :]:
            ahead = each[1]
            if self._reservations.is_one_too_many(ahead):
                continue
            if self._reservations.reserve(ahead) is not None:
                self._reserved.append(ahead)
            else:
                self._reservations.hold_back(ahead)
                self._holding.append(each)
        self._looked_at = len(self._waiting)
        return self._reservations

    def _any_time(self, who: Ahead) -> MayStartAnyTime:
        """Return why a request ahead has no reservation, so that nothing overtakes it."""
        leased = [lease.request for lease in leases_in_the_way(self._cluster, who.request)]
        for one in (*leased, *self._reserved):
            if self._cluster.runtimes.runtime_of(one) is None:
                lease_id = kept_for(one.lease_id)
                is_lease = lease_id in self._cluster.leases
                return MayStartAnyTime(who, name_in(self._cluster, lease_id), is_lease)
        return MayStartAnyTime(who)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one server on a request: fits now or not, could fit when empty or not, and the reasons."""

    node: str
    server_id: int
    fits: bool
    could_fit: bool
    reasons: tuple[Fact, ...]


def explain(cluster: ClusterState, request: Request) -> list[Verdict]:
    """Return the verdict of every server, in inventory order."""
    return [verdict(state, request) for state in cluster.nodes]


def verdict(state: NodeState, request: Request) -> Verdict:
    """Return one server's verdict on the request."""
    is_allowed = fit.can_meet(state.node, request)
    fits = is_allowed and state.fits(request)
    return Verdict(
        state.name,
        state.node.server_id,
        fits,
        is_allowed and not state.retired and fit.could_ever_fit(state.node, request),
        () if fits else tuple(_reasons(state, request)),
    )


def _reasons(state: NodeState, request: Request) -> list[Fact]:
    reasons: list[Fact] = []
    if not fit.can_meet(state.node, request):
        reasons.append(NoAddress())
    if state.retired:
        reasons.append(LeftInventory())
    if (closure := closure_of(state)) is not None:
        reasons.append(closure)
    if state.silent is not None and not isinstance(closure, IsSilent):
        reasons.append(IsSilent(state.silent.since))
    never = {(shortage.kind, shortage.name): shortage for shortage in fit.shortages(state.node, request)}
    # Unused capacity of a closed server does not count as free: only what it never has is said of it.
    found = list(fit.shortages(state.node, request, state.capacity)) if state.is_open else never.values()
    for shortage in found:
        ever = never.get((shortage.kind, shortage.name))
        reasons.append(_short(state, request, ever or shortage, ever=ever is not None))
        if shortage.kind is fit.ShortageKind.GPUS and state.is_open and not ever:
            gpus = withheld(state, fit.accepted_gpu_ids(state.node, request))
            reasons += [] if gpus is None else [gpus]
    return reasons


def _short(state: NodeState, request: Request, shortage: fit.Shortage, *, ever: bool) -> ServerShort:
    if shortage.kind is not fit.ShortageKind.GPUS:
        return ServerShort(shortage, ever, state.node.resources.get(shortage.name, 0))
    if not ever and request.gpu_milli != MILLI_PER_GPU:
        shortage = replace(shortage, has=most_free(state, request), wants=request.gpu_milli)
    of_mig = fit.has_mig_devices_for(state.node, request)
    return ServerShort(shortage, ever, fit.count_gpus(state.node, request), of_mig)
