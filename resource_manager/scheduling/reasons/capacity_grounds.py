"""Grounds of requests for which servers are short: what the inventory lacks, and what is free now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from resource_manager.core import fit
from resource_manager.core import server_facts as facts
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import withheld
from resource_manager.core.models import MILLI_PER_GPU, Lease, Request, Spread
from resource_manager.core.name_lookup import name_in
from resource_manager.core.names import name_of
from resource_manager.core.node_state import ClosedToRequest, NodeState
from resource_manager.core.refusal import Fact, FreeNow, Grounds, RefusalKind
from resource_manager.core.search import awaits_restore
from resource_manager.scheduling.placement.gang_slots import (
    could_ever_mask,
    could_ever_take,
    could_start,
    ever_slots,
    slots,
    slots_now,
    takes_ever,
)
from resource_manager.scheduling.placement.node_masks import areas_of, positions
from resource_manager.scheduling.preemption.preempting import kept_for

MAX_CLOSED = 3
"""Maximum number of closed servers among the facts of a refusal."""


# ---- never ----


def never_fits(cluster: ClusterState, request: Request) -> Grounds | None:
    """Return why the inventory could not satisfy the request even when empty; None if it could."""
    if could_ever_take(cluster, request):
        return None
    found = _never_a_member(cluster, request) or _never_together(cluster, request)
    return Grounds(RefusalKind.NEVER_FITS, (found,), request)


def _never_a_member(cluster: ClusterState, request: Request) -> Fact | None:
    """Return why no server could take a member; None if one could."""
    states = [state for state in cluster.nodes if not state.retired]
    if any(fit.could_ever_fit(state.node, request) for state in states):
        return None
    named = [state for state in states if request.required_node in (None, state.name)]
    allowed = [state for state in named if fit.has_labels(state.node, request)]
    if not allowed:
        return facts.LabelsMissing() if named else facts.NoServer()
    if not any(fit.accepts_node(state.node, request) for state in allowed) or (
        request.gpus and not any(state.node.gpus for state in allowed)
    ):
        unstated = (state.name for state in allowed if fit.lacks_stated_memory(state.node, request))
        types = {gpu.gpu_type for state in allowed for gpu in state.node.gpus if gpu.gpu_type}
        missing = types if types.isdisjoint(request.gpu_types) else ()
        return facts.KindMissing(next(unstated, ""), tuple(sorted(missing)) if request.gpu_types else ())
    best = max(allowed, key=lambda state: fit.count_gpus(state.node, request))
    most = fit.count_gpus(best.node, request)
    if most < request.gpus:
        of_mig = any(fit.has_mig_devices_for(state.node, request) for state in allowed)
        return facts.TooFewGpus(best.name, most, of_mig)
    return _amount_short(allowed, request, free=False) or facts.NeverTogether()


def _never_together(cluster: ClusterState, request: Request) -> Fact:
    """Return why the whole inventory cannot take the gang, although it can take a member."""
    areas = areas_of(cluster, request)
    if not areas:
        return facts.LabelUnknown()
    able = [state for state in cluster.nodes if not state.retired and fit.could_ever_fit(state.node, request)]
    without = [state for state in able if not state.node.address]
    if without and len(able) - len(without) < (request.nodes if request.spread is Spread.SERVERS else 1):
        return facts.AddressesMissing(len(without), len(able), without[0].name)
    if request.required_node is not None and request.spread is Spread.SERVERS:
        return facts.OneServerOnly()
    per_area = {value: ever_slots(cluster, request, mask) for value, mask in areas.items()}
    value = max(per_area, key=per_area.__getitem__)
    return facts.TooFewServers(per_area[value], value)


# ---- not now ----


def no_capacity(cluster: ClusterState, request: Request) -> Grounds:
    """Return why a request does not fit now that could fit if servers were empty."""
    return (_no_server if request.nodes == 1 else _too_few_servers)(cluster, request)


def _no_server(cluster: ClusterState, request: Request) -> Grounds:
    usable = _states(cluster, could_ever_mask(cluster, request))
    if not could_start(cluster, request):
        return Grounds(_kind_of_closed(usable), tuple(_closed_servers(usable, request)), request)
    is_open = [state for state in usable if state.is_open]
    if kept := kept_for_another(cluster, is_open, request):
        return Grounds(RefusalKind.BEHIND_QUEUE, (kept,), request)
    stated: list[Fact] = [facts.NoFreeServer(_nearest(is_open, request))]
    if unreleased := unreleased_lease(is_open, request):
        return Grounds(RefusalKind.AWAITING_RELEASE, (*stated, unreleased), request)
    closed = [state for state in usable if not state.is_open and _fits_without(state, [], request)]
    stated += _closed_servers(closed, request)
    marked = [state for state in is_open if request.gpus and (state.closed_gpus or state.cleaning)]
    found = (withheld(state, fit.accepted_gpu_ids(state.node, request)) for state in marked)
    stated += [gpus for gpus in found if gpus is not None][:1]
    return Grounds(RefusalKind.NO_CAPACITY, tuple(stated), request)


def _too_few_servers(cluster: ClusterState, request: Request) -> Grounds:
    could = could_ever_mask(cluster, request)
    able = {
        value: _states(cluster, mask & could)
        for value, mask in areas_of(cluster, request).items()
        if takes_ever(cluster, request, mask)
    }
    count = {value: sum(slots_now(state, request) for state in states) for value, states in able.items()}
    value = max(count, key=count.__getitem__)
    states, free = able[value], facts.MembersFree(count[value], value)
    if not could_start(cluster, request):
        closed = [state for state in states if not state.is_open or _has_lost_members(state, request)]
        return Grounds(_kind_of_closed(closed), (free, *_closed_servers(closed, request)), request)
    lacking = [state for state in states if state.is_open and not slots_now(state, request)]
    if kept := kept_for_another(cluster, lacking, request):
        return Grounds(RefusalKind.BEHIND_QUEUE, (free, kept), request)
    if unreleased := unreleased_lease(lacking, request):
        return Grounds(RefusalKind.AWAITING_RELEASE, (free, unreleased), request)
    stated: list[Fact] = [free]
    if count[value] >= request.nodes:
        stated = [facts.MembersFree(count[value], value, _without_port(states, request))]
    elif lacking:
        nearest = max(lacking, key=lambda state: most_free(state, request))
        stated.append(facts.NextServer(nearest.name, _next_lack(nearest, request)))
    return Grounds(RefusalKind.NO_CAPACITY, tuple(stated), request)


def _states(cluster: ClusterState, mask: int) -> list[NodeState]:
    return [cluster.nodes[position] for position in positions(mask)]


def _has_lost_members(state: NodeState, request: Request) -> bool:
    """Return whether the server could take fewer members than it does with all of its GPUs open."""
    if not state.closed_gpus:
        return False
    with_open_ones = slots(state.node, request, state.capacity_without_leases)
    return with_open_ones < slots(state.node, request, fit.total_capacity(state.node))


def _next_lack(state: NodeState, request: Request) -> facts.FreeShort | facts.Lack:
    for shortage in fit.shortages(state.node, request, state.capacity):
        if shortage.kind in (fit.ShortageKind.GPUS, fit.ShortageKind.AMOUNT):
            return facts.FreeShort(shortage.has, shortage.name)
    return lack_of([state], request)


def _without_port(states: list[NodeState], request: Request) -> facts.NoPort | facts.NoPlacement:
    for state in states:
        if slots_now(state, request) and not state.free_port():
            return facts.NoPort(state.name, *state.node.gang_ports)
    return facts.NoPlacement()


_token = attrgetter("fencing_token")


def leases_in_the_way(cluster: ClusterState, request: Request) -> Iterator[Lease]:
    """Yield the leases on open servers that could fit the request when empty, in one order everywhere."""
    for state in cluster.nodes:
        if state.is_open and state.could_fit(request):
            yield from sorted(state.leases.values(), key=_token)


def unreleased_lease(states: Iterable[NodeState], request: Request) -> facts.Unreleased | None:
    """Return a quarantined lease after whose release the request can start, or None."""
    for state in states:
        unconfirmed = [lease for lease in state.leases.values() if lease.quarantined]
        if unconfirmed and state.is_open and _fits_without(state, unconfirmed, request):
            first = min(unconfirmed, key=_token)  # the same one in every process
            return facts.Unreleased(name_of(first), state.name)
    return None


def kept_for_another(
    cluster: ClusterState, states: Iterable[NodeState], request: Request
) -> facts.FreeForPreemptor | None:
    """Return a server that only fits the request without what preempted leases have freed for another."""
    for state in states if cluster.preempting else ():
        parts = [lease for lease in state.leases.values() if kept_for(lease.lease_id) != lease.lease_id]
        if parts and state.is_open and _fits_without(state, parts, request):
            first = min(parts, key=_token)
            return facts.FreeForPreemptor(state.name, name_in(cluster, kept_for(first.lease_id)))
    return None


def free_on(state: NodeState, request: Request) -> FreeNow:
    """Return what is free on the server: GPUs, milli of one, or else the first resource of the request."""
    if not request.gpus:
        return FreeNow(state.free.get(next(iter(request.resources), "cpus"), 0), state.name)
    eligible = state.eligible_gpus(request)
    if request.gpu_milli != MILLI_PER_GPU:
        return FreeNow(max((state.gpu_free[gpu_id] for gpu_id in eligible), default=0), state.name)
    return FreeNow(len(eligible), state.name)


def is_by_gpus(cluster: ClusterState, request: Request) -> bool:
    """Return True if GPUs are what the pending request lacks on every open server that could fit it."""
    return request.gpus > 0 and not any(
        state.is_open and state.could_fit(request) and _gpus_suffice(state, request)
        for state in cluster.nodes
    )


def _nearest(states: list[NodeState], request: Request) -> facts.Lack:
    """Return what the best of these open servers is short of, none of which fits the request."""
    if request.required_node is None and request.gpus:
        best = max(states, key=lambda state: most_free(state, request))
        most = most_free(best, request)
        if most < (request.gpus if request.gpu_milli == MILLI_PER_GPU else request.gpu_milli):
            return facts.GpusShort(most, best.name)
        states = [state for state in states if _gpus_suffice(state, request)]
    return lack_of(states, request)


def most_free(state: NodeState, request: Request) -> int:
    """Return the node's number of free eligible GPUs; for a GPU fraction, the most milli free on one GPU."""
    if request.is_linked:
        return fit.count_gpus(state.node, request, state.capacity)
    if request.gpu_milli == MILLI_PER_GPU:
        any_gpu = not (request.is_particular or state.has_mig)
        return state.whole_free if any_gpu else len(state.eligible_gpus(request))
    accepted = fit.accepted_gpu_ids(state.node, request)
    return max((state.gpu_free[gpu_id] for gpu_id in accepted if gpu_id in state.gpu_free), default=0)


def _gpus_suffice(state: NodeState, request: Request) -> bool:
    return len(state.eligible_gpus(request)) >= request.gpus


def lack_of(states: list[NodeState], request: Request) -> facts.Lack:
    """Return what is short now, on the server with most of it."""
    if request.gpus and not any(_gpus_suffice(state, request) for state in states):
        return facts.GpusShort(max(most_free(state, request) for state in states))
    return _amount_short(states, request, free=True) or facts.NotAtOnce()


def _amount_short(states: list[NodeState], request: Request, *, free: bool) -> facts.AmountShort | None:
    """Return the first resource of which no server has enough, free or in total."""
    for name, amount in request.resources.items():
        has = {state.name: (state.free if free else state.node.resources).get(name, 0) for state in states}
        best = max(has, key=has.__getitem__)
        if fit.is_short(has[best], amount):
            return facts.AmountShort(name, max(has[best], 0), best, free)
    return None


def _kind_of_closed(states: list[NodeState]) -> RefusalKind:
    """Return the kind of a refusal by these closed servers: not searched, missing, or in maintenance."""
    if any(awaits_restore(state.drained) for state in states):
        return RefusalKind.RECOVERING
    is_missing = any(
        state.silent is not None
        or (isinstance(state.drained, ClosedToRequest) and isinstance(state.drained.why, facts.StartFailed))
        for state in states
    )
    return RefusalKind.NO_CAPACITY if is_missing else RefusalKind.MAINTENANCE


def _closed_servers(
    states: list[NodeState], request: Request
) -> Iterator[facts.ClosedServer | facts.MoreClosed]:
    """Yield the closed servers, or those with closed GPUs, and how many more there are."""
    for state in states[:MAX_CLOSED]:
        has = most_free(state, request) if request.gpus else 0
        yield facts.ClosedServer(state.name, has, _closure_of(state, request))
    if len(states) > MAX_CLOSED:
        yield facts.MoreClosed(len(states) - MAX_CLOSED)


def _closure_of(state: NodeState, request: Request) -> facts.Closure:
    if state.is_open:
        gpu_ids = state.closed_gpus.keys() & fit.accepted_gpu_ids(state.node, request)
        return withheld(state, gpu_ids) or facts.WithheldGpus(())
    return closure_of(state) or facts.IsDrained("")


def closure_of(state: NodeState) -> facts.Closure | None:
    """Return what closes a server as a whole, None for one that is open or only left the inventory."""
    if isinstance(state.drained, ClosedToRequest):
        return state.drained.why
    if state.drained is not None:
        return facts.IsDrained(state.drained.reason, state.drained.failed)
    return None if state.silent is None else facts.IsSilent(state.silent.since)


def _fits_without(state: NodeState, gone: Collection[Lease], request: Request) -> bool:
    """Return True if the request would fit the node if it were open and the leases in `gone` had ended."""
    free = state.capacity_without_leases
    for lease in state.leases.values():
        if lease not in gone:
            for member in lease.on(state.name):
                free = free.minus(lease.request, state.gpu_ids_of(member))
    return fit.fits(state.node, request, free)
