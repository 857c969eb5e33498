"""A new inventory moves only the nodes that differ."""

from __future__ import annotations

from dataclasses import replace

from resource_manager import allocator
from resource_manager.cluster import ClusterState
from resource_manager.models import Drained, InventoryChanged, Node, Request
from resource_manager.policies import get_policy


def test_an_inventory_that_changes_one_node_leaves_the_others_as_they_are() -> None:
    nodes = tuple(Node(f"n{i}", i, {"cpus": 8}) for i in range(3))
    cluster = ClusterState(nodes)
    for i in range(3):
        request = Request(f"t{i}", resources={"cpus": 5}, required_node=f"n{i}")
        for change in allocator.allocate(cluster, request, get_policy("first_fit"), 0.0):
            cluster.apply(change)
    cluster.apply(Drained("n2", 1.0))
    kept = cluster.by_name["n2"]
    mark = cluster.mark

    cluster.apply(InventoryChanged((nodes[2], replace(nodes[0], resources={"cpus": 4})), 2.0))

    assert cluster.by_name["n2"] is kept
    assert (kept.index, kept.free, kept.is_open) == (0, {"cpus": 3}, False)
    assert cluster.by_name["n0"].free == {"cpus": -1}  # the lease lives on though the node shrank
    assert (cluster.by_name["n1"].retired, cluster.by_name["n1"].free) == (True, {"cpus": 3})
    assert cluster.changed_since(mark) is None  # places moved: whoever follows looks at everything
    allocator.check(cluster)
    again = ClusterState.from_snapshot(cluster.snapshot())
    assert again.snapshot() == cluster.snapshot()
    assert [state.free for state in again.nodes] == [state.free for state in cluster.nodes]
