"""GLB against scores computed by hand, and as a policy of the manager."""

from __future__ import annotations

import math

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Placement, Request
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.placement.policies.glb import demand_of, glb, node_score, rank_vendors


def node(name: str, vendor: str, compute: float, memory: float) -> Node:
    return Node(name, 0, {"compute_tflops": compute, "memory_gb": memory}, vendor=vendor)


def ask(compute: float, memory: float, **more: object) -> Request:
    return Request("task", resources={"compute_tflops": compute, "memory_gb": memory}, **more)  # type: ignore[arg-type]


def grant(cluster: ClusterState, name: str, compute: float, memory: float) -> None:
    request = Request(f"on-{name}", resources={"compute_tflops": compute, "memory_gb": memory})
    cluster.apply(allocator.grant(cluster, request, (Placement(name),), 0.0))


def test_node_score_computed_by_hand() -> None:
    cluster = ClusterState([node("a", "x", 100, 80)])
    grant(cluster, "a", 20, 40)
    # After placement 50 of 100 and 60 of 80 are used: 0.5 and 0.75; mean left 0.375, deviation 0.125.
    score = node_score(cluster.nodes[0], demand_of(ask(30, 20)))
    assert score == pytest.approx(0.6 * 0.375 + 0.4 * (1 - 0.125))
    assert node_score(cluster.nodes[0], demand_of(ask(30, 20)), balance=1.0) == pytest.approx(0.375)
    assert node_score(cluster.nodes[0], demand_of(ask(30, 20)), balance=0.0) == pytest.approx(0.875)


def test_vendor_score_sums_free_capacity_over_its_nodes() -> None:
    cluster = ClusterState([node("x1", "x", 60, 40), node("x2", "x", 40, 40), node("y1", "y", 80, 100)])
    request = ask(40, 40)
    # x: 40/100 + 40/80 = 0.9; y: 40/80 + 40/100 = 0.9: a tie, which the order of the inventory decides.
    assert rank_vendors(cluster, request) == ["x", "y"]
    grant(cluster, "x1", 1, 0)
    assert rank_vendors(cluster, request) == ["y", "x"]
    assert rank_vendors(cluster, request, {"x": 1.1}) == ["x", "y"]
    assert rank_vendors(cluster, ask(40, 40, vendor="x")) == ["x"]


def test_the_next_vendor_is_used_if_no_node_of_the_best_fits() -> None:
    # x has more in sum (100, 100) but no node with 60; y (70, 70) has one.
    cluster = ClusterState([node("x1", "x", 50, 50), node("x2", "x", 50, 50), node("y1", "y", 70, 70)])
    assert rank_vendors(cluster, ask(60, 60)) == ["x", "y"]
    assert glb(cluster, ask(60, 60)) == Placement("y1")
    assert glb(cluster, ask(60, 60), vendor_fallback=False) is None
    assert glb(cluster, ask(40, 40), vendor_fallback=False) == Placement("x1")
    assert glb(cluster, ask(80, 80)) is None


def test_a_vendor_with_nothing_free_comes_last() -> None:
    cluster = ClusterState([node("x1", "x", 100, 100), node("y1", "y", 10, 10)])
    grant(cluster, "x1", 100, 0)
    assert rank_vendors(cluster, ask(1, 1)) == ["y", "x"]


def test_balance_outweighs_free_capacity_at_a_low_weight() -> None:
    # Empty nodes: "lean" ends at (0.5, 0.5), "wide" at (0.2, 0.5).
    cluster = ClusterState([node("wide", "x", 100, 40), node("lean", "x", 40, 40)])
    assert glb(cluster, ask(20, 20), balance=1.0) == Placement("wide")
    assert glb(cluster, ask(20, 20), balance=0.0) == Placement("lean")
    assert math.isclose(node_score(cluster.nodes[1], demand_of(ask(20, 20))), 0.6 * 0.5 + 0.4)


def test_gpus_and_gpu_fractions_count_as_one_more_resource() -> None:
    gpus = tuple(Gpu(i) for i in range(4))
    cluster = ClusterState([Node("a", 1, {"cpus": 8}, gpus), Node("b", 2, {"cpus": 64}, gpus)])
    assert glb(cluster, Request("t", gpus=2, resources={"cpus": 8})) == Placement("b", (0, 1))
    assert glb(cluster, Request("t", gpus=1, gpu_milli=250)) == Placement("a", (0,))
    assert glb(cluster, Request("nothing asked")) == Placement("a")


def test_an_uncounted_resource_must_fit_and_changes_no_score() -> None:
    sizes = {"x1": 100, "x2": 100, "y1": 90, "y2": 90}
    cluster = ClusterState(
        [Node(name, 0, {"cpus": cpus, "slots": 1}, vendor=name[0]) for name, cpus in sizes.items()]
    )
    slot = Request("on x1", resources={"slots": 1})
    cluster.apply(allocator.grant(cluster, slot, (Placement("x1"),), 0.0))
    request = Request("task", resources={"cpus": 20, "slots": 1})
    # By CPUs x is better, 20/200 against 20/180; with the slots it is not, + 1/1 against + 1/2.
    assert glb(cluster, request, uncounted=("slots",)) == Placement("x2")
    assert glb(cluster, request) == Placement("y1")
    # Used after it: 0.1 and 0.1 of one node, 0.02 and 0.14 of the other, which is less, but uneven.
    even = Node("even", 0, {"cpus": 140, "memory_gb": 140, "slots": 1})
    uneven = Node("uneven", 0, {"cpus": 700, "memory_gb": 100, "slots": 1})
    request = Request("task", resources={"cpus": 14, "memory_gb": 14, "slots": 1})
    assert glb(ClusterState([even, uneven]), request, uncounted=("slots",)) == Placement("even")
    assert glb(ClusterState([even, uneven]), request) == Placement("uneven")


def test_the_manager_selects_glb_by_name() -> None:
    assert get_policy("glb") is glb
    manager = GPUResourceManager.from_url("memory://", policy="glb")
    try:
        first = manager.allocate_resources("a", 4, 16)
        second = manager.allocate_resources("b", 4, 16)
        assert first is not None
        assert second is not None
        # The remaining capacity decides, so the second task goes to an empty server.
        assert first["server_id"] != second["server_id"]
        assert manager.release_resources("a")
    finally:
        manager.close()
