"""A new inventory moves only the nodes that differ."""

from __future__ import annotations

from dataclasses import replace

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.changes import Drained, InventoryChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Node, Request
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import redefine


def test_an_inventory_that_changes_one_node_leaves_the_others_as_they_are() -> None:
    nodes = tuple(Node(f"n{i}", i, {"cpus": 8}) for i in range(3))
    cluster = ClusterState(nodes)
    for i in range(3):
        request = Request(f"t{i}", resources={"cpus": 5}, required_node=f"n{i}")
        for change in allocator.allocate(
            cluster, request, SchedulingPass(get_policy("first_fit"), fifo, 0.0)
        ):
            cluster.apply(change)
    cluster.apply(Drained("n2", 1.0))
    kept = cluster.by_name["n2"]
    mark = cluster.mark

    smaller = replace(nodes[0], resources={"cpus": 4})
    cluster.apply(InventoryChanged((smaller, *nodes[1:]), 2.0))

    assert cluster.changed_since(mark) == [0]
    assert cluster.by_name["n2"] is kept
    assert cluster.by_name["n0"].free == {"cpus": -1}  # the lease stays although the node shrank
    assert cluster.by_server_id[0] is cluster.nodes[0] is cluster.by_name["n0"]
    allocator.check(cluster)
    assert same_after_snapshot(cluster)


def test_the_largest_amount_of_any_node_follows_a_resized_node() -> None:
    nodes = tuple(Node(f"n{i}", i, {"cpus": 8}) for i in range(2))
    cluster = ClusterState(nodes)
    for resources, most in (
        ({"cpus": 64}, {"cpus": 64}),
        ({"cpus": 4, "fpga": 1}, {"cpus": 8, "fpga": 1}),
    ):
        cluster.apply(InventoryChanged((replace(nodes[0], resources=resources), nodes[1]), 1.0))
        assert cluster.largest == most


def test_an_inventory_that_moves_nodes_is_indexed_again() -> None:
    cluster = ClusterState((Node("a", 0, {"cpus": 8}), Node("b", 1, {"cpus": 8})))
    for change in allocator.allocate(
        cluster, Request("t", resources={"cpus": 5}), SchedulingPass(get_policy("first_fit"), fifo, 0)
    ):
        cluster.apply(change)
    mark = cluster.mark

    cluster.apply(InventoryChanged((Node("b", 1, {"cpus": 8}),), 1.0))

    assert cluster.changed_since(mark) is None  # positions moved: followers must read everything
    assert [(state.name, state.retired) for state in cluster.nodes] == [("b", False), ("a", True)]
    allocator.check(cluster)
    assert same_after_snapshot(cluster)


def test_the_servers_can_change_although_leases_expired() -> None:
    now = [1000.0]
    store, settings = MemoryStore(clock=lambda: now[0]), Settings(store="memory://")
    manager = GPUResourceManager(settings, store=store, inventory=default_inventory(2, 8, 64))
    manager.allocate_resources("over", 8, 1, ttl=30)
    manager.allocate_resources("held", 8, 1)
    manager.submit("waits", 8, 1)
    now[0] += 60

    restarted = GPUResourceManager(settings, store=store)
    redefine(restarted, nodes=default_inventory(3, 8, 64))

    assert len(restarted.get_resource_summary()["servers"]) == 3
    assert [lease["task_id"] for lease in restarted.leases()] == ["held", "waits"]


def same_after_snapshot(cluster: ClusterState) -> bool:
    again = ClusterState.from_snapshot(cluster.snapshot())
    return again.snapshot() == cluster.snapshot() and [
        (state.free, state.is_open) for state in again.nodes
    ] == [(state.free, state.is_open) for state in cluster.nodes]
