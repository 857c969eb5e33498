"""A change of the inventory that tells what it was before, at the size of what changed."""

from __future__ import annotations

from collections.abc import Sequence

from resource_manager.core.changes import InventoryChanged
from resource_manager.core.models import Node


def inventory_changed(before: Sequence[Node], nodes: Sequence[Node], at: float) -> InventoryChanged:
    """Return the change from one inventory to another."""
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
