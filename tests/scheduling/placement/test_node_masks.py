"""Masks of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Node
from resource_manager.scheduling.placement.node_masks import domain_masks, positions


@given(st.sets(st.integers(0, 40)))
def test_masks_and_positions_are_the_same(found: set[int]) -> None:
    cluster = ClusterState(Node(f"s{i}", i, labels={"rack": "x"} if i in found else {}) for i in range(41))
    assert set(positions(domain_masks(cluster, "rack").get("x", 0))) == found
