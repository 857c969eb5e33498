"""Explanations why a request is not granted now: one refusal, and a verdict for each server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.fit import (
    Shortage,
    ShortageKind,
    accepted_gpu_ids,
    could_ever_fit,
    count_gpus,
    has_mig_devices_for,
    shortages,
)
from resource_manager.core.gpu_state import withheld
from resource_manager.core.models import MILLI_PER_GPU, PendingRequest, Request
from resource_manager.core.name_lookup import name_in
from resource_manager.core.names import short
from resource_manager.core.node_state import ClosedToRequest
from resource_manager.core.refusal import (
    ONE_MIG_DEVICE,
    Refusal,
    RefusalKind,
    label_words,
    leases_in_the_way,
    needs,
    silence_of,
)
from resource_manager.scheduling import allocator
from resource_manager.scheduling.backfill import Reservations
from resource_manager.scheduling.gang_refusals import free_now, never_fits, no_capacity
from resource_manager.scheduling.gangs import Prospects, fitting_node
from resource_manager.scheduling.maintenance import closed_for, place_now
from resource_manager.scheduling.preemption import awaiting_release, ending_for, held_back
from resource_manager.scheduling.quotas import quota_refusal, stop_of
from resource_manager.scheduling.scheduling_pass import SchedulingPass

SHORTEST_RUN_S = 0.001
"""A request that could not even start with this runtime is not helped by stating one."""


AT_THE_NEXT_PASS = "granted at the next pass over the queue, within seconds"


@dataclass(frozen=True, slots=True)
class Standing:
    """Position of a pending request in queue order, from 1, and the refusal that says why it is pending."""

    position: int
    entry: PendingRequest
    refusal: Refusal


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
        with held_back(cluster, current):
            yield from list(_standings(cluster, current, only))
    else:
        yield from _standings(cluster, current, only)


def _standings(
    cluster: ClusterState,
    current: SchedulingPass,
    only: Collection[str] | None,
) -> Iterator[Standing]:
    reasons = _Reasons(cluster, current)
    for position, entry in enumerate(current.order(cluster, current.now), 1):
        if only is None or entry.lease_id in only:
            yield Standing(position, entry, reasons.of(entry))
        reasons.advance(position, entry)


def refusals_of(
    cluster: ClusterState,
    requests: Iterable[Request],
    current: SchedulingPass,
) -> dict[str, Refusal]:
    """Return the refusal of each request by task id, as if it was queued now; the cluster is unchanged."""
    with cluster.trial():
        asked = {request.lease_id: request for request in requests}
        new = [request for lease_id, request in asked.items() if lease_id not in cluster.pending]
        for change in allocator.enqueue(cluster, new, current.now):
            cluster.apply(change)
        return {
            standing.entry.lease_id: standing.refusal for standing in standings(cluster, current, only=asked)
        }


class _Reasons:
    """Refusals of pending requests, computed one after the other from the head of the queue."""

    def __init__(
        self,
        cluster: ClusterState,
        current: SchedulingPass,
    ) -> None:
        self._cluster = cluster
        self._current = current
        self._ahead: tuple[int, Request] | None = None
        """Position and request of the first one passed that blocks all behind it."""
        self._reservations: Reservations | None = None
        self._waiting: list[tuple[int, Request]] = []
        """With backfill, the requests passed that wait, in order."""
        self._looked_at = 0
        """How many of them have a reservation, or hold back what they could use."""
        self._reserved: list[Request] = []
        self._holding: list[tuple[int, Request, int]] = []
        """Position and request of those that hold something back; how many have all places in time, or 0."""
        self._nodes: dict[tuple[object, ...], NodeState | None] = {}
        self._no_capacity: dict[tuple[object, ...], Refusal] = {}

    def advance(self, position: int, entry: PendingRequest) -> None:
        """Advance to the requests behind this one."""
        request = entry.request
        if self._cluster.ledger is not None and (
            stop_of(self._cluster.ledger, request) is not None or ending_for(self._cluster, request.lease_id)
        ):
            return
        if self._ahead is None:
            if self._node(request) is None and allocator.blocks_queue(self._cluster, request, self._current):
                self._ahead = (position, request)
        elif not self._current.order.backfill:
            return
        elif self._node(request) is None:
            if not allocator.blocks_queue(self._cluster, request, self._current):
                return
        elif self._by_price(entry):
            return
        if self._ahead is not None:
            self._waiting.append((position, request))

    def of(self, entry: PendingRequest) -> Refusal:
        request = entry.request
        node = self._node(request)
        if node is None and (never := never_fits(self._cluster, request)):
            return never
        if self._current.suspended is not None:
            return self._current.suspended
        if self._cluster.preempting and (
            waits := awaiting_release(self._cluster, request.lease_id, self._current.now)
        ):
            return waits
        if node is None:
            if stopped := quota_refusal(self._cluster, request):
                return stopped
            key = self._key(request)
            if key not in self._no_capacity:
                with closed_for(self._cluster, request, self._current):
                    self._no_capacity[key] = no_capacity(self._cluster, request)
            return self._no_capacity[key]
        return quota_refusal(self._cluster, request) or self._by_price(entry) or self._behind(request, node)

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
        runtime = self._cluster.runtimes.runtime_of(request)
        return (*shape, None if runtime is None else runtime.seconds, request.preemptible)

    def _by_price(self, entry: PendingRequest) -> Refusal | None:
        admission, request = self._current.limits.admission, entry.request
        if admission is None or request.utility is None:
            return None
        members = place_now(self._cluster, request, self._current)
        if members is None:
            return None
        quote = admission.quote(self._cluster, request, members, entry.queued_at, self._current.now)
        if quote.covered:
            return None
        return Refusal(
            RefusalKind.PRICE,
            f"utility {quote.utility:g} does not exceed the price {quote.price:g} on "
            f"{short(members[0].node)}{f' and {len(members) - 1} more' if len(members) > 1 else ''}",
        )

    def _behind(self, request: Request, node: NodeState) -> Refusal:
        free = free_now(node, request)
        if self._ahead is None:
            detail = f"{free}; no request is ahead: {AT_THE_NEXT_PASS}"
            return Refusal(RefusalKind.BEHIND_QUEUE, detail)
        position, ahead = self._ahead
        if self._current.order.backfill:
            detail = f"{free}; {self._delay(request, node)}"
        else:
            who = self._who(position, ahead)
            rule = f", {self._current.order.rule}" if self._current.order.rule else ""
            reserved = node.could_fit(ahead)
            detail = f"{free}; reserved for {who}{rule}" if reserved else f"{free}; {who} is ahead{rule}"
        return Refusal(RefusalKind.BEHIND_QUEUE, detail)

    def _who(self, position: int, ahead: Request) -> str:
        who = name_in(self._cluster, ahead.lease_id)
        return f"{who} (position {position}, {needs(self._cluster, ahead)})"

    def _delay(self, request: Request, node: NodeState) -> str:
        """Say why backfill does not start the request now, by the same steps as `allocator.dispatch`."""
        if self._reservations is None:
            self._reservations = Reservations(self._cluster, self._current)
        for position, ahead in self._waiting[self._looked_at :]:
            too_late_for = len(self._reserved) if self._reservations.is_one_too_many(ahead) else 0
            if self._reservations.reserve(ahead) is not None:
                self._reserved.append(ahead)
            else:
                self._reservations.hold_back(ahead)
                self._holding.append((position, ahead, too_late_for))
        self._looked_at = len(self._waiting)
        members = place_now(self._cluster, request, self._current)
        if members is not None and self._reservations.without_delay(request, members):
            return AT_THE_NEXT_PASS
        usable = Prospects.of(self._cluster).usable
        for position, ahead, too_late_for in self._holding:
            if usable(ahead) >> node.index & 1:
                return self._no_place(position, ahead, too_late_for)
        delayed = (each for each in self._waiting if usable(each[1]) >> node.index & 1)
        assert self._ahead is not None
        detail = f"starting now could delay {self._who(*next(delayed, self._ahead))}"
        if members is not None and self._cluster.runtimes.runtime_of(request) is None:
            brief = replace(request, expected_runtime_s=SHORTEST_RUN_S)
            if self._reservations.without_delay(brief, members) is not None:
                return f"{detail}, because its runtime is unknown: state expected_runtime"
        return detail

    def _no_place(self, position: int, ahead: Request, too_late_for: int) -> str:
        """Say why a request ahead has no reservation, so that nothing overtakes it where it could start."""
        who = self._who(position, ahead)
        if too_late_for:
            return f"nothing overtakes {who}: only {too_late_for} before it have a place in time"
        leased = [lease.request for lease in leases_in_the_way(self._cluster, ahead)]
        unknown = (
            one for one in (*leased, *self._reserved) if self._cluster.runtimes.runtime_of(one) is None
        )
        cause = ""
        if endless := next(unknown, None):
            noun = "lease " if endless.lease_id in self._cluster.leases else ""
            cause = f": the runtime of {noun}{name_in(self._cluster, endless.lease_id)} is unknown"
        return f"{who} may start at any moment{cause}, so nothing overtakes it"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one server on a request: fits now or not, could fit when empty or not, and the reasons."""

    node: str
    server_id: int
    fits: bool
    could_fit: bool
    reasons: tuple[str, ...]


def explain(cluster: ClusterState, request: Request) -> list[Verdict]:
    """Return the verdict of every server, in inventory order."""
    return [verdict(state, request) for state in cluster.nodes]


def verdict(state: NodeState, request: Request) -> Verdict:
    """Return one server's verdict on the request."""
    can_meet = request.nodes == 1 or bool(state.node.address)
    fits = can_meet and state.fits(request)
    return Verdict(
        state.name,
        state.node.server_id,
        fits,
        can_meet and not state.retired and could_ever_fit(state.node, request),
        () if fits else tuple(_reasons(state, request)),
    )


def _reasons(state: NodeState, request: Request) -> list[str]:
    reasons: list[str] = []
    if request.nodes != 1 and not state.node.address:
        reasons.append("has no address in the inventory, which each member of a gang needs")
    if state.retired:
        reasons.append("left the inventory")
    if state.drained is not None:
        if isinstance(state.drained, ClosedToRequest):
            reasons.append(state.drained.reason)
        else:
            why = f": {state.drained.reason}" if state.drained.reason else ""
            reasons.append(("failed" if state.drained.failed else "drained") + why)
    if state.silent is not None:
        reasons.append(f"has been {silence_of(state)}")
    never = {(shortage.kind, shortage.name): shortage for shortage in shortages(state.node, request)}
    # Unused capacity of a closed server does not count as free: only what it never has is said of it.
    found = list(shortages(state.node, request, state.capacity)) if state.is_open else never.values()
    for shortage in found:
        ever = never.get((shortage.kind, shortage.name))
        reasons.append(_in_words(state, request, ever or shortage, ever=ever is not None))
        if shortage.kind is ShortageKind.GPUS and state.is_open and not ever:
            reasons += withheld(state, accepted_gpu_ids(state.node, request))
    return reasons


def _in_words(state: NodeState, request: Request, shortage: Shortage, *, ever: bool) -> str:
    has, wants = shortage.has, shortage.wants
    match shortage.kind:
        case ShortageKind.SERVER:
            return f"the request is for {request.required_node} only"
        case ShortageKind.LABELS:
            return f"the request is for servers with {label_words(request)} only"
        case ShortageKind.GPU_TYPE:
            return f"has no GPU of {' '.join((*request.gpu_types, request.vendor)).strip()}"
        case ShortageKind.GPUS if ever and has_mig_devices_for(state.node, request):
            return f"{ONE_MIG_DEVICE}; it has {has} other GPUs, {wants} requested"
        case ShortageKind.GPUS if ever:
            return f"has {has} GPUs in total, {wants} requested"
        case ShortageKind.GPUS if request.gpu_milli != MILLI_PER_GPU:
            most = max(state.gpu_free[gpu_id] for gpu_id in accepted_gpu_ids(state.node, request))
            return f"at most {most} milli of one GPU free, {request.gpu_milli} requested"
        case ShortageKind.GPUS:
            return f"{has} of {count_gpus(state.node, request)} GPUs free, {wants} requested"
        case ShortageKind.AMOUNT if ever:
            return f"has {has:g} {shortage.name} in total, {wants:g} requested"
    total = state.node.resources.get(shortage.name, 0)
    return f"{max(has, 0):g} of {total:g} {shortage.name} free, {wants:g} requested"
