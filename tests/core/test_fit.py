"""One rule of fit: the fast path of `NodeState` and of backfill, `explain` and the grant agree with it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import Change, Granted, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import (
    FreeCapacity,
    ShortageKind,
    accepted_gpu_ids,
    accepts_node,
    could_ever_fit,
    fits,
    shortages,
    total_capacity,
)
from resource_manager.core.models import Gpu, Lease, Link, Node, Placement, Request, Spread
from resource_manager.errors import NeverFitsError
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import POLICIES, get_policy
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.backfill import Reservations
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.reasons.feasibility import verdict
from resource_manager.scheduling.scheduling_pass import SchedulingPass

TYPES = ["A100", "T4", ""]
VENDORS = ["nvidia", "amd"]
MEMORY_MIB = [0, 15109, 40960]
KINDS = st.tuples(st.sampled_from(TYPES), st.sampled_from(VENDORS), st.sampled_from(MEMORY_MIB))


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    kinds = draw(st.lists(KINDS, max_size=4))
    gpus = tuple(Gpu(number, *kind) for number, kind in enumerate(kinds))
    labels = draw(st.dictionaries(st.sampled_from("xy"), st.sampled_from("12")))
    amounts = {"cpus": draw(st.integers(0, 8)), "gb": draw(st.floats(0, 8))}
    islands = draw(st.sampled_from([(), ((0, 1), (2, 3)), ((0, 2, 3),)]))
    return Node("a", 0, amounts, gpus, labels=labels, islands=islands)


@st.composite
def requests(draw: st.DrawFn, lease_id: str = "t") -> Request:
    gpus, milli = draw(st.sampled_from([(0, 1000), (1, 1000), (2, 1000), (1, 250), (1, 700)]))
    return Request(
        lease_id,
        gpus,
        milli,
        draw(st.dictionaries(st.sampled_from(["cpus", "gb", "disk"]), st.integers(0, 6) | st.just(1e-10))),
        gpu_types=tuple(draw(st.lists(st.sampled_from(TYPES[:2]), max_size=2, unique=True))),
        gpu_memory=draw(st.sampled_from(["", "", "7GB", "16GB", "15GiB", "40GB"])),
        vendor=draw(st.sampled_from(["", *VENDORS])),
        link=draw(st.sampled_from(Link)),
        required_node=draw(st.sampled_from([None, None, "a", "b"])),
        labels_required=draw(st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=1)),
    )


@given(nodes(), st.lists(requests(), max_size=4), requests())
def test_every_path_agrees_with_the_rule(node: Node, held: list[Request], request: Request) -> None:
    cluster = ClusterState([node, Node("b", 1)])
    state = cluster.by_name["a"]
    for number, each in enumerate(held):
        if state.fits(each):
            lease = Lease(
                each.for_task(f"h{number}"), (Placement("a", state.pick_gpus(each)),), number + 1, 0.0
            )
            cluster.apply(Granted(lease, 0.0))
    free = state.capacity
    now = fits(node, request, free)
    assert now == state.fits(request) == verdict(state, request).fits
    assert now == (not list(shortages(node, request, free)))
    assert could_ever_fit(node, request) == fits(node, request, total_capacity(node))
    assert not now or could_ever_fit(node, request)
    if now:
        placement = Placement("a", state.pick_gpus(request))
        assert Reservations(cluster, SchedulingPass(first_fit, fifo, 0.0)).without_delay(
            request, (placement,)
        ) == (placement,)
        with cluster.trial():
            cluster.apply(Granted(Lease(request, (placement,), 99, 0.0), 0.0))
    elif request.required_node in (None, "a"):
        words = verdict(state, request).reasons
        assert len(words) == len({(s.kind, s.name) for s in shortages(node, request, free)})


def test_what_is_short_says_how_much() -> None:
    node = Node("a", 0, {"cpus": 8}, (Gpu(0, "T4"), Gpu(1, "T4")))
    (gpus, cpus) = shortages(node, Request("t", 4, resources={"cpus": 16}))
    assert (gpus.kind, gpus.has, gpus.wants) == (ShortageKind.GPUS, 2, 4)
    assert (cpus.kind, cpus.name, cpus.has, cpus.wants) == (ShortageKind.AMOUNT, "cpus", 8, 16)
    (kind,) = shortages(node, Request("t", 1, gpu_types=("A100",)))
    assert kind.kind is ShortageKind.GPU_TYPE


MIXED = Node(
    "mixed",
    0,
    {"cpus": 8, "disk_gib": 0.5},
    (Gpu(0, "A100"), Gpu(1, "A100"), Gpu(2, "V100"), Gpu(5, "MI300", "amd")),
    labels={"zone": "x"},
)
BARE = Node("bare", 1, {"cpus": 4}, vendor="amd")


@pytest.mark.parametrize(
    ("demand", "ids"),
    [
        ({}, {0, 1, 2, 5}),
        ({"gpu_types": ("A100",)}, {0, 1}),
        ({"gpu_types": ("V100", "MI300")}, {2, 5}),
        ({"vendor": "amd"}, {5}),
        ({"vendor": "nvidia", "gpu_types": ("MI300", "V100")}, {2}),
        ({"gpu_types": ("H100",)}, set()),
    ],
)
def test_gpus_are_accepted_by_type_and_vendor(demand: dict[str, object], ids: set[int]) -> None:
    request = Request("t", 1, **demand)  # type: ignore[arg-type]
    assert accepted_gpu_ids(MIXED, request) == ids
    assert accepts_node(MIXED, request) is bool(ids)


def test_a_node_without_gpus_is_accepted_by_its_own_vendor_and_by_no_type() -> None:
    assert accepts_node(BARE, Request("t"))
    assert accepts_node(BARE, Request("t", vendor="amd"))
    assert not accepts_node(BARE, Request("t", vendor="nvidia"))
    assert not accepts_node(BARE, Request("t", gpu_types=("A100",)))
    assert accepted_gpu_ids(BARE, Request("t")) == set()


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        (Request("t", 4, resources={"cpus": 8, "disk_gib": 0.5}), True),
        (Request("t", 5), False),
        (Request("t", 1, 1), True),
        (Request("t", resources={"cpus": 9}), False),
        (Request("t", resources={"disk_gib": 0.50001}), False),
        (Request("t", resources={"memory_mib": 1}), False),
        (Request("t", resources={"memory_mib": 0}), True),
        (Request("t", 2, gpu_types=("A100",)), True),
        (Request("t", 3, gpu_types=("A100",)), False),
        (Request("t", 3, gpu_types=("A100", "V100")), True),
        (Request("t", 3, vendor="nvidia"), True),
        (Request("t", 4, vendor="nvidia"), False),
        (Request("t", 0, gpu_types=("V100",)), True),
        (Request("t", 0, gpu_types=("H100",)), False),
        (Request("t", 1, required_node="mixed"), True),
        (Request("t", 1, required_node="other"), False),
        (Request("t", 1, preferred_node="other"), True),
        (Request("t", 1, labels_required={"zone": "x"}), True),
        (Request("t", 1, labels_required={"zone": "y"}), False),
        (Request("t", 1, labels_required={"rack": ""}), False),
    ],
    ids=str,
)
def test_a_node_could_fit_what_its_totals_allow(request_: Request, fits: bool) -> None:
    assert could_ever_fit(MIXED, request_) is fits


def test_free_capacity_is_intersected_and_lessened_without_changing_itself() -> None:
    free = FreeCapacity({0: 1000, 1: 400}, {"cpus": 8})
    both = free.intersect(FreeCapacity({0: 300, 1: 1000}, {"cpus": 5}))
    assert (both.gpus, both.amounts) == ({0: 300, 1: 400}, {"cpus": 5})
    less = free.minus(Request("t", 1, 400, {"cpus": 3, "disk_gib": 1}), (1,))
    assert (less.gpus, less.amounts) == ({0: 1000, 1: 0}, {"cpus": 5, "disk_gib": -1})
    assert (free.gpus, free.amounts) == ({0: 1000, 1: 400}, {"cpus": 8})
    assert free.minus(Request("t", 1), (7,)).gpus == free.gpus, "a GPU that left the node is not counted"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("nodes", [1, 3])
def test_parts_of_an_amount_use_it_up(policy: str, nodes: int) -> None:
    """Of 0.6 the third 0.2 was not granted: the sum of floats leaves 0.19999999999999996."""
    cluster = ClusterState([Node("a", 0, {"tb": 0.6}, tuple(map(Gpu, range(4))), "10.0.0.1")])
    current = SchedulingPass(get_policy(policy), get_order("fifo+backfill"), 0.0)

    def ask(name: str) -> list[Change]:
        request = Request(name, 1, resources={"tb": 0.2}, nodes=nodes, spread=Spread.PACK)
        return allocator.submit(cluster, request, current)

    for number in range(3 // nodes):
        (change,) = ask(f"t{number}")
        assert isinstance(change, Granted)
        cluster.apply(change)
    allocator.check(cluster)
    assert [type(change) for change in ask("late")] == [Queued]
    assert [
        each.name
        for each in shortages(
            cluster.nodes[0].node, Request("t", resources={"tb": 0.2}), cluster.nodes[0].capacity
        )
    ] == ["tb"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_of_what_there_is_none_the_least_amount_is_short(policy: str) -> None:
    """1e-10 of what no server has was within the rounding of sums, and `glb` divided by nothing."""
    cluster = ClusterState([Node("a", 0, {"cpus": 8, "tb": 0.5, "empty": 0}, (Gpu(0),))])
    current = SchedulingPass(get_policy(policy), get_order("fifo"), 0.0)
    for name, gpus in product(("missing", "empty"), (0, 1)):
        with pytest.raises(NeverFitsError):
            allocator.submit(cluster, Request("t", gpus, resources={name: 1e-10}), current)
    (change,) = allocator.submit(cluster, Request("all", resources={"tb": 0.5}), current)
    cluster.apply(change)
    for gpus in (0, 1):
        request = Request(f"{gpus}", gpus, resources={"tb": 1e-10})
        (change,) = allocator.submit(cluster, request, current)
        assert isinstance(change, Queued)
