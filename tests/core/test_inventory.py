"""The change of an inventory tells what it was before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.inventory import inventory_before, inventory_changed
from resource_manager.core.models import Node
from tests.builders import nodes

INVENTORIES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(8, 9)), unique_by=lambda each: each[0]
).map(lambda found: [replace(nodes(name)[0], resources={"cpus": cpus}) for name, cpus in found])


@given(INVENTORIES, INVENTORIES)
def test_a_change_has_the_inventory_after_it_and_the_one_before(
    before: list[Node], after: list[Node]
) -> None:
    change = inventory_changed(before, after, 5.0)
    assert (change.nodes, change.at) == (tuple(after), 5.0)
    assert inventory_before(change) == tuple(before)


def test_a_change_has_of_the_inventory_before_only_what_it_replaced() -> None:
    a, b, c = nodes("abc")
    larger = replace(b, resources={"cpus": 16})
    change = inventory_changed([a, b], [a, larger, c], 5.0)
    assert (change.replaced, change.added) == (((1, b),), ("c",))
