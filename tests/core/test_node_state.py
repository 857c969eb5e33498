"""Fit of requests on one node, and the choice of its GPUs."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import AgentLost, Drained, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import accepts_node, could_ever_fit
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.node_state import NodeState

A100, H100 = (Gpu(0, "A100", "nvidia"), Gpu(1, "A100", "nvidia")), (Gpu(2, "H100", "nvidia"),)
MI300 = (Gpu(3, "MI300", "amd"),)
UNIFORM = Node("n", 0, {"cpus": 8}, A100)
MIXED = Node("n", 0, {"cpus": 8}, (*A100, *H100, *MI300))
LABELLED = Node("n", 0, {"cpus": 8}, A100, labels={"zone": "a", "rack": "7"})
WITHOUT_GPUS = Node("n", 0, {"cpus": 8}, vendor="huawei")


@pytest.mark.parametrize(
    ("node", "request_", "expected"),
    [
        (UNIFORM, Request("t", resources={"cpus": 8}), True),
        (UNIFORM, Request("t", resources={"cpus": 9}), False),
        (UNIFORM, Request("t", resources={"fpga": 0}), True),
        (UNIFORM, Request("t", resources={"fpga": 1}), False),
        (UNIFORM, Request("t", required_node="n"), True),
        (UNIFORM, Request("t", required_node="m"), False),
        (UNIFORM, Request("t", 2), True),
        (UNIFORM, Request("t", 3), False),
        (UNIFORM, Request("t", 2, gpu_types=("A100",)), True),
        (UNIFORM, Request("t", 3, gpu_types=("A100",)), False),
        (UNIFORM, Request("t", 1, gpu_types=("H100",)), False),
        (UNIFORM, Request("t", 1, vendor="nvidia"), True),
        (UNIFORM, Request("t", 1, vendor="amd"), False),
        (UNIFORM, Request("t", 1, gpu_milli=500, gpu_types=("H100",)), False),
        (LABELLED, Request("t", 2, labels_required={"zone": "a", "rack": "7"}), True),
        (LABELLED, Request("t", 2, labels_required={"zone": "a", "rack": "8"}), False),
        (LABELLED, Request("t", labels_required={"row": ""}), False),
        (UNIFORM, Request("t", 2, labels_required={"zone": "a"}), False),
        # A task without GPUs may still require a node with a GPU type or vendor.
        (UNIFORM, Request("t", gpu_types=("A100",)), True),
        (UNIFORM, Request("t", gpu_types=("H100",)), False),
        (UNIFORM, Request("t", vendor="nvidia"), True),
        (UNIFORM, Request("t", vendor="amd"), False),
        (MIXED, Request("t", 4), True),
        (MIXED, Request("t", 2, gpu_types=("A100",)), True),
        (MIXED, Request("t", 2, gpu_types=("H100",)), False),
        (MIXED, Request("t", 1, gpu_types=("H100",), vendor="nvidia"), True),
        (MIXED, Request("t", 1, gpu_types=("H100",), vendor="amd"), False),
        (MIXED, Request("t", gpu_types=("H100",), vendor="amd"), False),
        (WITHOUT_GPUS, Request("t", vendor="huawei"), True),
        (WITHOUT_GPUS, Request("t", vendor="nvidia"), False),
        (WITHOUT_GPUS, Request("t", gpu_types=("A100",)), False),
        (WITHOUT_GPUS, Request("t", gpu_types=("A100",), vendor="huawei"), False),
        (WITHOUT_GPUS, Request("t", 1), False),
    ],
)
def test_fit_on_an_empty_node(node: Node, request_: Request, expected: bool) -> None:
    assert NodeState(node, 5).fits(request_) is expected
    assert could_ever_fit(node, request_) is expected


@pytest.mark.parametrize("node", [UNIFORM, MIXED, WITHOUT_GPUS])
def test_a_request_without_constraints_accepts_every_node(node: Node) -> None:
    assert accepts_node(node, Request("t")) is True


def holding(*leases: tuple[int, tuple[int, ...]], node: Node = MIXED) -> NodeState:
    """Return the state of a node with leases of that many milli on those GPUs."""
    cluster = ClusterState([node])
    for token, (milli, gpu_ids) in enumerate(leases, 1):
        request = Request(f"t{token}", len(gpu_ids), gpu_milli=milli)
        cluster.apply(Granted(Lease(request, (Placement("n", gpu_ids),), token, 0.0), 0.0))
    return cluster.node("n")


@pytest.mark.parametrize(
    ("request_", "gpu_ids"),
    [
        (Request("t"), ()),
        (Request("t", 1), (0,)),
        (Request("t", 3), (0, 1, 2)),
        (Request("t", 2, gpu_types=("H100", "MI300")), (2, 3)),
        (Request("t", 1, vendor="amd"), (3,)),
        (Request("t", 1, gpu_milli=300), (0,)),
        (Request("t", 1, gpu_milli=300, gpu_types=("H100",)), (2,)),
    ],
)
def test_the_lowest_gpus_of_an_idle_node_are_picked(request_: Request, gpu_ids: tuple[int, ...]) -> None:
    assert NodeState(MIXED, 0).pick_gpus(request_) == gpu_ids


def test_gpus_are_ordered_by_id_independently_of_the_inventory() -> None:
    state = NodeState(Node("n", 0, {}, tuple(reversed(MIXED.gpus))), 0)
    assert list(state.gpu_free) == [0, 1, 2, 3]
    assert state.gpu_types == ("A100", "A100", "H100", "MI300")
    assert NodeState(UNIFORM, 0).gpu_types == ("A100",)


def test_only_free_gpus_of_a_busy_node_are_picked() -> None:
    state = holding((1000, (0,)), (400, (1,)), (700, (3,)))
    assert (state.whole_free, state.free_milli) == (1, 600 + 1000 + 300)
    assert state.pick_gpus(Request("t", 1)) == (2,)
    assert state.pick_gpus(Request("t", 1, gpu_milli=300)) == (3,), "the tightest"
    assert state.pick_gpus(Request("t", 1, gpu_milli=301)) == (1,)
    assert state.pick_gpus(Request("t", 1, gpu_milli=601)) == (2,)
    assert state.eligible_gpus(Request("t", 1, gpu_milli=300)) == [1, 2, 3]
    assert state.eligible_gpus(Request("t", 1, gpu_milli=300, gpu_types=("A100",))) == [1]
    assert state.eligible_gpus(Request("t", 1)) == [2]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request("t", 1), True),
        (Request("t", 2), False),
        (Request("t", 1, gpu_types=("H100",)), True),
        (Request("t", 1, gpu_types=("A100",)), False),
        (Request("t", 1, gpu_milli=600, gpu_types=("A100",)), True),
        (Request("t", 1, gpu_milli=601, gpu_types=("A100",)), False),
    ],
)
def test_fit_on_a_busy_node(request_: Request, expected: bool) -> None:
    assert holding((1000, (0,)), (400, (1,)), (700, (3,))).fits(request_) is expected


@pytest.mark.parametrize(
    ("held", "request_", "expected"),
    [
        (((400, (0,)), (700, (1,))), Request("t", 1, gpu_milli=600), True),
        (((400, (0,)), (700, (1,))), Request("t", 1, gpu_milli=601), False),
        (((400, (0,)), (700, (1,))), Request("t", 1), False),
        (((400, (0,)),), Request("t", 1, gpu_milli=999), True),
        (((400, (0,)),), Request("t", 1), True),
        (((400, (0,)),), Request("t", 2), False),
        (((400, (0,)),), Request("t", 1, gpu_milli=999, gpu_types=("A100",)), True),
        (((400, (0,)),), Request("t", 1, gpu_milli=100, gpu_types=("H100",)), False),
        (((400, (0,)),), Request("t", 1, vendor="amd"), False),
    ],
)
def test_fit_on_a_busy_node_of_one_gpu_type(
    held: tuple[tuple[int, tuple[int, ...]], ...], request_: Request, expected: bool
) -> None:
    assert holding(*held, node=UNIFORM).fits(request_) is expected


def test_a_free_gpu_of_another_type_does_not_fit() -> None:
    two_kinds = Node("n", 0, {}, (Gpu(0, "A100"), Gpu(1, "H100")))
    state = holding((1000, (1,)), node=two_kinds)
    assert state.fits(Request("t", 1, gpu_types=("A100",)))
    assert not state.fits(Request("t", 1, gpu_types=("H100",)))
    assert not state.fits(Request("t", 1, gpu_milli=100, gpu_types=("H100",)))


def test_no_request_fits_a_closed_node() -> None:
    for closed, change in (
        ("drained", Drained("n", 0.0)),
        ("retired", True),
        ("silent", AgentLost("n", 60.0, 0.0)),
    ):
        state = NodeState(UNIFORM, 0)
        assert state.is_open
        setattr(state, closed, change)
        assert not state.is_open
        assert not state.fits(Request("t"))
        assert not state.fits(Request("t", 1))
        assert could_ever_fit(state.node, Request("t", 1))
