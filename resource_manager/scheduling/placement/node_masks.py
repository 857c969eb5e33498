"""Nodes of an inventory as masks (bit i: node i), computed once an inventory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import can_meet
from resource_manager.core.models import Request
from resource_manager.core.node_state import NodeState

T = TypeVar("T")


MAX_KEPT = 1024
"""The most values kept for one inventory."""


def domain_masks(cluster: ClusterState, label: str) -> dict[str, int]:
    """Return the nodes of each value of the label, as masks."""

    def masks() -> dict[str, int]:
        found: dict[str, list[int]] = {}
        for state in cluster.nodes:
            if (value := state.node.labels.get(label)) is not None:
                found.setdefault(value, []).append(state.index)
        return {value: mask_of(indexes) for value, indexes in found.items()}

    return of_inventory(cluster, ("label", label), masks)


def areas_of(cluster: ClusterState, request: Request) -> dict[str, int]:
    """Return the masks of nodes of which one takes all members, by value of the request's label `same`."""
    return domain_masks(cluster, request.same) if request.same else {"": -1}


def where_they_meet(cluster: ClusterState, request: Request) -> int:
    """Return the mask of the nodes where members can meet: those with an address, and any for one alone."""
    return _where(cluster, ("meet", request.nodes != 1), lambda state: can_meet(state.node, request))


def allowed_for(cluster: ClusterState, request: Request) -> int:
    """Return the mask of the nodes of the inventory that a member may be on, whatever their capacity."""
    mask = where_they_meet(cluster, request) & _where(cluster, "inventory", lambda state: not state.retired)
    if request.required_node is not None:
        state = cluster.by_name.get(request.required_node)
        mask &= 0 if state is None else 1 << state.index
    for name, value in request.labels_required.items():
        mask &= domain_masks(cluster, name).get(value, 0)
    return mask


def uniform(cluster: ClusterState) -> int:
    """Return the mask of the nodes of which a request accepts all GPUs or none."""
    return _where(cluster, "uniform", lambda state: state.uniform)


def _where(cluster: ClusterState, key: Hashable, holds: Callable[[NodeState], bool]) -> int:
    return of_inventory(
        cluster, key, lambda: mask_of([state.index for state in cluster.nodes if holds(state)])
    )


def of_inventory(cluster: ClusterState, key: Hashable, compute: Callable[[], T]) -> T:
    """Return a value that depends on the inventory alone, each of which brings a new `largest`."""
    known = cluster.policy_cache.get(of_inventory)
    if known is None or known[0] is not cluster.largest or len(known[1]) > MAX_KEPT:
        known = cluster.policy_cache[of_inventory] = (cluster.largest, {})
    values: dict[Hashable, T] = known[1]
    if key not in values:
        values[key] = compute()
    return values[key]


def mask_of(indexes: list[int]) -> int:
    bits = bytearray(max(indexes, default=0) // 8 + 1)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(bits, "little")


def union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def first_of(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def positions(mask: int) -> Iterator[int]:
    """Yield the positions of the mask's bits, ascending."""
    offset = 0
    for byte in mask.to_bytes((mask.bit_length() + 7) // 8, "little"):
        while byte:
            low = byte & -byte
            yield offset + low.bit_length() - 1
            byte ^= low
        offset += 8
