"""Gangs: several members of one lease, placed all at once or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from resource_manager.core.changes import Drained, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import KEY_SEPARATOR, Lease, Placement, Request, Spread, TypeChoice
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.gang_slots import SlotsOf, count_slots, slots_now
from resource_manager.scheduling.placement.node_masks import (
    domain_masks,
    first_of,
    positions,
    union,
    where_they_meet,
)
from resource_manager.scheduling.placement.policies import Policy, select_placement
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.quotas import within_guarantee

Members = tuple[Placement, ...]
"""Placements of a lease in the order of their ranks; one unless several nodes were asked for."""


class Part(NamedTuple):
    """Nodes as a mask (bit i: node i) and how many members go there."""

    mask: int
    members: int


class Domain(NamedTuple):
    """Nodes of one value of a label that can take members, and how many; the fullest sorts first."""

    is_other: bool
    """False for the domain of the preferred node."""
    slots: int
    mask: int


def select_members(cluster: ClusterState, request: Request, policy: Policy) -> Members | None:
    """Return the placements of all members, in order of rank; None unless all fit now.

    Of types in order of preference all members get the first that fits, or else what fits of all of them.
    """
    if cluster.ledger is not None:
        request = within_guarantee(cluster.ledger, request)
    for of_type in by_type(request):
        members = select_members(cluster, of_type, policy)
        if members is not None:
            return members
    if request.nodes == 1:
        placement = select_placement(cluster, request, policy)
        return None if placement is None else (placement,)

    def placed(allowed: int) -> Members | None:
        parts = plan(cluster, request, allowed)
        return _place(cluster, request, policy, parts) if parts else None

    return ranked(cluster, request, placed)


def by_type(request: Request) -> list[Request]:
    """Return the request on each of its types alone, if it wants the first that fits; else nothing."""
    if request.types is not TypeChoice.FIRST or len(request.gpu_types) < 2:
        return []
    return [replace(request, gpu_types=(gpu_type,)) for gpu_type in request.gpu_types]


def ranked(
    cluster: ClusterState, request: Request, placed: Callable[[int], Sequence[Placement] | None]
) -> Members | None:
    """Return the members of a gang by domain and inventory order, the first with a port where they meet.

    `placed` returns them on the nodes of a mask, nothing if they do not fit there: servers that would be the
    first, but have no port left, are left out one after the other.
    """
    label = request.prefer_same or request.same
    firsts: dict[str, int] = {}
    if label:
        firsts = {value: first_of(mask) for value, mask in domain_masks(cluster, label).items()}

    def place(member: Placement) -> tuple[int, int, tuple[int, ...]]:
        state = cluster.by_name[member.node]
        return firsts.get(state.node.labels.get(label, ""), len(cluster.nodes)), state.index, member.gpu_ids

    without_port = 0
    while members := placed(~without_port):
        first, *others = sorted(members, key=place)
        meeting = cluster.by_name[first.node]
        if port := meeting.free_port():
            return (replace(first, port=port), *others)
        without_port |= 1 << meeting.index
    return None


def fitting_node(cluster: ClusterState, request: Request) -> NodeState | None:
    """Return the first node that a request of that shape may get now; None if it does not fit."""
    alike = replace(request, preferred_node=None, types=TypeChoice.BEST)
    members = select_members(cluster, alike, first_fit)
    return None if members is None else cluster.by_name[members[0].node]


def plan(
    cluster: ClusterState, request: Request, allowed: int = -1, slots_of: SlotsOf | None = None
) -> list[Part]:
    """Return nodes that can take all members now, as parts that each take a number of them; else nothing.

    `allowed` is a mask of nodes. `slots_of` replaces what the nodes have free now.
    """
    allowed &= where_they_meet(cluster, request)
    if slots_of is not None:
        allowed &= cluster.open_mask
    else:
        allowed &= cluster.candidate_mask(request)
        if request.spread is Spread.SERVERS and allowed.bit_count() < request.nodes:
            return []

        def slots_of(state: NodeState) -> int:
            return slots_now(state, request)

    if not request.same:
        return _near(cluster, request, allowed, slots_of)
    best: list[Part] = []
    for mask in _whole_domains(cluster, request, request.same, allowed, slots_of):
        parts = _near(cluster, request, mask, slots_of)
        if not best or len(parts) < len(best):
            best = parts
        if len(best) == 1:
            break
    return best


def _near(cluster: ClusterState, request: Request, allowed: int, slots_of: SlotsOf) -> list[Part]:
    """Return the fullest domain of `prefer_same` that takes all members, else as few domains as possible.

    Nodes without that label, or all nodes if it is empty, come last.
    """
    nodes = request.nodes
    for mask in _whole_domains(cluster, request, request.prefer_same, allowed, slots_of):
        return [Part(mask, nodes)]
    domains = _domains(cluster, request, request.prefer_same, allowed, slots_of)
    parts: list[Part] = []
    while domains and nodes:
        enough = [domain for domain in domains if domain.slots >= nodes]
        domain = enough[0] if enough else max(domains, key=lambda domain: domain.slots)
        domains.remove(domain)
        parts.append(Part(domain.mask, min(domain.slots, nodes)))
        nodes -= parts[-1].members
    if nodes:
        unlabelled = allowed & ~union(domain_masks(cluster, request.prefer_same).values())
        if count_slots(cluster, unlabelled, slots_of, nodes) < nodes:
            return []
        parts.append(Part(unlabelled, nodes))
    return parts


def _whole_domains(
    cluster: ClusterState, request: Request, label: str, allowed: int, slots_of: SlotsOf
) -> Iterator[int]:
    """Yield the nodes of each domain that takes all members, the fullest first.

    With one member a node, of which each needs GPUs, it is the one with the fewest nodes that have the GPUs
    free; only then the other amounts are looked at, node by node.
    """
    nodes = request.nodes
    if request.spread is Spread.PACK or not request.gpus:
        for domain in _domains(cluster, request, label, allowed, slots_of):
            if domain.slots >= nodes:
                yield domain.mask
        return
    preferred = _preferred(cluster, request, slots_of)
    found = [
        Domain(not mask & preferred, mask.bit_count(), mask)
        for mask in (mask & allowed for mask in domain_masks(cluster, label).values())
        if mask.bit_count() >= nodes
    ]
    for domain in sorted(found, key=_by_fullness):
        if count_slots(cluster, domain.mask, slots_of, nodes) >= nodes:
            yield domain.mask


def _preferred(cluster: ClusterState, request: Request, slots_of: SlotsOf) -> int:
    """Return the mask of the preferred node if it takes a member."""
    state = cluster.by_name.get(request.preferred_node or "")
    return 1 << state.index if state is not None and slots_of(state) else 0


def _by_fullness(domain: Domain) -> tuple[bool, int, int]:
    return domain.is_other, domain.slots, first_of(domain.mask)


def _domains(
    cluster: ClusterState, request: Request, label: str, allowed: int, slots_of: SlotsOf
) -> list[Domain]:
    """Return the domains of the label that can take any members, the fullest first."""
    preferred = _preferred(cluster, request, slots_of)
    found: list[Domain] = []
    for mask in domain_masks(cluster, label).values():
        if not (mask := mask & allowed):
            continue
        if count := count_slots(cluster, mask, slots_of):
            found.append(Domain(not mask & preferred, count, mask))
    return sorted(found, key=_by_fullness)


def _place(cluster: ClusterState, request: Request, policy: Policy, parts: list[Part]) -> Members | None:
    """Ask the policy member by member inside a trial, part by part."""
    member = replace(request, nodes=1)
    found: list[Placement] = []
    for mask, count in parts:
        # A policy reads the whole state it is given: to keep it to some nodes, it gets a state of these.
        is_free = mask == cluster.candidate_mask(member)
        arena = cluster if is_free else cluster.part(positions(mask))
        with arena.trial():
            for rank in range(count):
                placement = select_placement(arena, member, policy)
                if placement is None:
                    return None
                found.append(placement)
                task = member.for_task(f"{KEY_SEPARATOR}{rank}")  # the id of no lease
                lease = Lease(task, (placement,), arena.last_fencing_token + 1, 0.0)
                arena.apply(Granted(lease, 0.0))
                if request.spread is Spread.SERVERS:
                    arena.apply(Drained(placement.node, 0.0))
    return tuple(found)
