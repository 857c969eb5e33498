"""Refusals of gangs: how many servers fit, and what the next one lacks."""

from __future__ import annotations

from resource_manager.core import refusal
from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.fit import ShortageKind, could_ever_fit, shortages
from resource_manager.core.models import Request, Spread
from resource_manager.core.names import short
from resource_manager.core.refusal import Refusal, RefusalKind, free_on, needed
from resource_manager.scheduling.gangs import (
    could_ever_take,
    domain_masks,
    ever_slots,
    member_of,
    positions,
    slots,
    takes_ever,
)


def never_fits(cluster: ClusterState, request: Request) -> Refusal | None:
    """Return the refusal of a request that the inventory could not satisfy even when empty, else None."""
    if request.nodes == 1:
        return refusal.never_fits(cluster, request)
    if could_ever_take(cluster, request):
        return None
    areas = domain_masks(cluster, request.same) if request.same else {"": (1 << len(cluster.nodes)) - 1}
    return refusal.never_fits(cluster, member_of(request)) or Refusal(
        RefusalKind.NEVER_FITS, _never(cluster, request, areas)
    )


def _never(cluster: ClusterState, request: Request, areas: dict[str, int]) -> str:
    """Say why the whole inventory cannot take the gang, although it can take a member."""
    nodes, label = request.nodes, request.same
    if label and not areas:
        return f"same={short(label)}: no server has that label"
    member = member_of(request)
    able = [state for state in cluster.nodes if not state.retired and could_ever_fit(state.node, member)]
    without = [state for state in able if not state.node.address]
    if without and len(able) - len(without) < (nodes if request.spread is Spread.SERVERS else 1):
        return (
            f"nodes={nodes}: each server of a gang needs an address in the inventory, and {len(without)} of "
            f"the {len(able)} that could take it have none, such as {short(without[0].name)}"
        )
    if request.required_node is not None and request.spread is Spread.SERVERS:
        return (
            f"nodes={nodes} needs {nodes} servers, and server={short(request.required_node)} allows one: "
            "leave it out, or ask for spread=pack"
        )
    per_area = {
        value: sum(ever_slots(cluster.nodes[position], request) for position in positions(mask))
        for value, mask in areas.items()
    }
    value = max(per_area, key=per_area.__getitem__)
    what = f"servers with {needed(request)}"
    if request.spread is Spread.PACK:
        what = f"times {needed(request)}"
    if label:
        return (
            f"nodes={nodes} needs {nodes} {what} in one {short(label)}: the largest, "
            f"{short(label)}={short(value)}, has {per_area[value]}"
        )
    return f"nodes={nodes} needs {nodes} {what}: the inventory has {per_area[value]}"


def no_capacity(cluster: ClusterState, request: Request) -> Refusal:
    """Return the refusal of a request that does not fit now but could if servers were empty."""
    if request.nodes == 1:
        return refusal.no_capacity(cluster, request)
    label = request.same
    areas = domain_masks(cluster, label) if label else {"": (1 << len(cluster.nodes)) - 1}
    areas = {value: mask for value, mask in areas.items() if takes_ever(cluster, request, mask)}
    able = {
        value: [
            state for position in positions(mask) if ever_slots(state := cluster.nodes[position], request)
        ]
        for value, mask in areas.items()
    }
    count = {value: sum(slots_now(state, request) for state in states) for value, states in able.items()}
    value = max(count, key=count.__getitem__)
    states = able[value]
    where = f" in {short(label)}={short(value)}" if label else ""
    what = "servers have" if request.spread is Spread.SERVERS else "members fit:"
    detail = f"{count[value]} of {request.nodes} {what} {needed(request)} free{where}"
    opened = [state for state in states if state.is_open]
    if not any(takes_ever(cluster, request, mask & cluster.open_mask) for mask in areas.values()):
        closed = [state for state in states if not state.is_open]
        return Refusal(refusal.kind_of_closed(closed), f"{detail}; {refusal.closed_servers(closed, request)}")
    lacking = [state for state in opened if not slots_now(state, request)]
    if unreleased := refusal.unreleased_lease(lacking, request):
        return Refusal(RefusalKind.AWAITING_RELEASE, f"{detail}; {unreleased}")
    if count[value] >= request.nodes:
        detail = f"{detail}, but {_without_port(states, request)}"
    elif lacking:
        nearest = max(lacking, key=lambda state: refusal.most_free(state, request))
        detail = f"{detail}; the next, {short(nearest.name)}: {_lack(nearest, request)}"
    return Refusal(RefusalKind.NO_CAPACITY, detail)


def _lack(state: NodeState, request: Request) -> str:
    for shortage in shortages(state.node, request, state.capacity):
        if shortage.kind is ShortageKind.GPUS:
            return f"{shortage.has:g} GPU{'' if shortage.has == 1 else 's'} free"
        if shortage.kind is ShortageKind.AMOUNT:
            return f"{max(shortage.has, 0):g} {short(shortage.name)} free"
    return refusal.lack_of([state], request)


def _without_port(states: list[NodeState], request: Request) -> str:
    for state in states:
        if slots_now(state, request) and not state.free_port():
            first, last = state.node.gang_ports
            return f"all gang_ports of {short(state.name)} ({first} to {last}) are in use"
    return "the policy found no placement"


def slots_now(state: NodeState, request: Request) -> int:
    """Return how many members of the gang the server takes now."""
    return slots(state.node, request, state.capacity) if state.is_open and state.node.address else 0


def free_now(node: NodeState, request: Request) -> str:
    """Return a phrase such as `2 A100 are free on s1`, for a gang of all its servers."""
    if request.nodes == 1:
        return free_on(node, request)
    if request.spread is Spread.SERVERS:
        return f"{request.nodes} servers have {needed(request)} free"
    return f"{needed(request)} are free {request.nodes} times"
