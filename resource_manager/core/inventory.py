"""Changes of the inventory: what it was before them, and which servers keep the GPUs that they reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resource_manager.core.changes import InventoryChanged
from resource_manager.core.models import Gpu, Node


@dataclass(frozen=True, slots=True)
class Adoption:
    """GPUs that a server's own report gave it in place of those in the inventory; no file takes them back."""

    node: str
    gpus: tuple[Gpu, ...]
    at: float
    by: str = ""


def inventory_changed(before: Sequence[Node], nodes: Sequence[Node], at: float) -> InventoryChanged:
    """Return the change from one inventory to another, at the size of what changed."""
    old = {node.name: node for node in before}
    kept = [node.name for node in nodes if old.get(node.name) == node]
    if kept != [node.name for node in before if node.name in set(kept)]:
        kept = []  # they stand in another order
    replaced = tuple((place, node) for place, node in enumerate(before) if node.name not in set(kept))
    added = tuple(node.name for node in nodes if node.name not in old)
    return InventoryChanged(tuple(nodes), at, replaced, added)


def inventory_before(change: InventoryChanged) -> tuple[Node, ...]:
    """Return the inventory before a change of `inventory_changed`."""
    gone = {*change.added, *(node.name for _, node in change.replaced)}
    before = [node for node in change.nodes if node.name not in gone]
    for place, node in change.replaced:
        before.insert(place, node)
    return tuple(before)


def adoptions_after(adoptions: Mapping[str, Adoption], change: InventoryChanged) -> dict[str, Adoption]:
    """Return the adoptions by server: one more if the change adopts, without those it gives other GPUs."""
    after = dict(adoptions)
    for node in change.nodes:
        if node.name == change.adopted:
            after[node.name] = Adoption(node.name, node.gpus, change.at, change.by)
        elif node.name in after and after[node.name].gpus != node.gpus:
            del after[node.name]
    return after
