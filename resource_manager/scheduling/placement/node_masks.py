"""Nodes of an inventory as masks (bit i: node i), computed once an inventory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from resource_manager.core.cluster import ClusterState

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

    return of_inventory(cluster, f"label {label}", masks)


def addressed(cluster: ClusterState) -> int:
    """Return the mask of the nodes with an address, which the members of a gang need to meet."""
    return of_inventory(
        cluster, "address", lambda: mask_of([state.index for state in cluster.nodes if state.node.address])
    )


def uniform(cluster: ClusterState) -> int:
    """Return the mask of the nodes of which a request accepts all GPUs or none."""
    return of_inventory(
        cluster, "uniform", lambda: mask_of([state.index for state in cluster.nodes if state.uniform])
    )


def of_inventory(cluster: ClusterState, name: str, compute: Callable[[], T]) -> T:
    """Return a value that depends on the inventory alone, each of which brings a new `largest`."""
    known = cluster.policy_cache.get(of_inventory)
    if known is None or known[0] is not cluster.largest or len(known[1]) > MAX_KEPT:
        known = cluster.policy_cache[of_inventory] = (cluster.largest, {})
    values: dict[str, T] = known[1]
    if name not in values:
        values[name] = compute()
    return values[name]


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
