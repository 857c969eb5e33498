"""Every policy keeps its contract, and incremental scoring chooses the same as scoring every node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager import GPUResourceManager
from resource_manager.core.changes import Change, Drained, Granted, InventoryChanged, Resumed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import POLICIES, Policy, get_policy, takes_seed
from resource_manager.scheduling.placement.policies.cpu_gpu_scores import (
    CORES,
    dot_product_for,
    weighted_fit_for,
)
from resource_manager.scheduling.placement.policies.fgd import (
    Fragmentation,
    TaskClass,
    fgd,
    fgd_for,
    logistic_score,
)
from resource_manager.scheduling.placement.policies.fitting import Fitting
from resource_manager.scheduling.placement.policies.gpu_clustering import gpu_clustering
from resource_manager.scheduling.placement.policies.gpu_packing import gpu_packing
from resource_manager.scheduling.placement.policies.measured import Measure
from resource_manager.scheduling.placement.policies.random import random
from resource_manager.scheduling.placement.policies.scoring import Scored
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass

NODES = (
    Node("a", 1, {"cpus": 16}, tuple(Gpu(i, "T4") for i in range(2))),
    Node("b", 2, {"cpus": 16}, tuple(Gpu(i, "T4") for i in range(2))),
    Node("c", 3, {"cpus": 32, "memory_mib": 64}, tuple(Gpu(i, "V100") for i in range(4))),
    Node("d", 4, {"cpus": 32}, (Gpu(0, "T4"), Gpu(1, "V100"), Gpu(2, "V100"))),
    Node("e", 5, {"cpus": 8}),
)
TWINS = tuple(Node(f"twin{i}", 10 + i, {"cpus": 16}, tuple(Gpu(i, "T4") for i in range(2))) for i in range(4))
WIDE = NODES[:2] + TWINS + NODES[2:]
"""Nodes of which several are alike, adjacent to each other and apart."""

MIX = Fragmentation(
    {TaskClass(4, 500, 1, ()): 3, TaskClass(8, 1000, 2, ("V100",)): 2, TaskClass(2, 0, 0, ()): 1}
)

SCORED: dict[str, Callable[[], Scored]] = {
    "fgd": lambda: fgd_for(MIX),
    "weighted_fit": lambda: weighted_fit_for(CORES),
    "dot_product": lambda: dot_product_for(CORES),
    "gpu_packing": lambda: gpu_packing,
    "gpu_clustering": lambda: gpu_clustering,
}

requests = st.builds(
    lambda gpus, milli, cpus, types, memory, required: Request(
        "?",
        gpus,
        milli if gpus == 1 else 1000,
        {"cpus": cpus} | ({"memory_mib": memory} if memory else {}),
        types,
        required_node=required,
    ),
    gpus=st.integers(0, 3),
    milli=st.sampled_from([1000, 250, 500, 700]),
    cpus=st.integers(0, 10),
    types=st.sampled_from([(), (), (), ("T4",), ("V100", "T4")]),
    memory=st.sampled_from([0, 0, 0, 8]),
    required=st.sampled_from([None, None, None, None, "c"]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), requests),
        st.tuples(st.just("ask"), requests),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("drain"), st.sampled_from("abcde")),
        st.tuples(st.just("resume"), st.sampled_from("abcde")),
        st.tuples(st.just("resize"), st.tuples(st.sampled_from("abe"), st.sampled_from([4, 16]))),
        st.tuples(st.just("try"), requests),
    ),
    max_size=40,
)


def named(request: Request, task_id: str) -> Request:
    return Request(
        task_id,
        request.gpus,
        request.gpu_milli,
        request.resources,
        request.gpu_types,
        required_node=request.required_node,
    )


def play(cluster: ClusterState, policy: Policy, script: list[tuple[str, object]]) -> list[Placement | None]:
    """Play the script and return the policy's placement for each request of it."""
    chosen: list[Placement | None] = []
    for number, (what, argument) in enumerate(script):
        changes: list[Change] = []
        if what == "ask":
            assert isinstance(argument, Request)
            changes = allocator.allocate(
                cluster, named(argument, f"t{number}"), SchedulingPass(policy, fifo, float(number))
            )
            chosen.append(changes[0].lease.placement if changes else None)  # type: ignore[union-attr]
        elif what == "end":
            assert isinstance(argument, int)
            running = list(cluster.leases)
            if running:
                changes = lease_steps.release(cluster, running[argument % len(running)], float(number))
        elif what == "drain":
            changes = [Drained(str(argument), float(number))]
        elif what == "resize":
            changes = [InventoryChanged(resized(cluster, *argument), float(number))]  # type: ignore[misc]
        elif what == "try":
            assert isinstance(argument, Request)
            with cluster.trial():
                for change in allocator.allocate(
                    cluster, named(argument, f"t{number}"), SchedulingPass(policy, fifo, 0.0)
                ):
                    cluster.apply(change)
                again = policy(cluster, argument)
            chosen += [again, policy(cluster, argument)]
        else:
            changes = [Resumed(str(argument), float(number))]
        for change in changes:
            cluster.apply(change)
        allocator.check(cluster)
    return chosen


def resized(cluster: ClusterState, name: str, cpus: int) -> tuple[Node, ...]:
    """Return the cluster's inventory with so many CPUs and a new resource, but no memory, on one node."""
    return tuple(
        replace(state.node, resources={"cpus": cpus, "scratch_gb": cpus})
        if state.name == name
        else state.node
        for state in cluster.nodes
    )


def best_of_all(policy: Scored) -> Policy:
    """Return the same policy without a cache: every node is scored for every request."""

    def select_placement(cluster: ClusterState, request: Request) -> Placement | None:
        best = max(cluster.candidates(request), key=lambda node: policy.score(node, request), default=None)
        return None if best is None else Placement(best.name, policy._pick(best, request))

    return select_placement


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCORED)
@settings(max_examples=60)
@given(script=steps)
def test_incremental_scoring_chooses_as_full_scoring(name: str, script: list[tuple[str, object]]) -> None:
    policy = SCORED[name]()
    quick = play(ClusterState(WIDE), policy, script)
    slow = play(ClusterState(WIDE), best_of_all(policy), script)
    assert quick == slow


@settings(max_examples=60)
@given(script=steps)
def test_fitting_nodes_are_listed_as_by_a_scan_of_all_nodes(script: list[tuple[str, object]]) -> None:
    def last_that_fits(cluster: ClusterState, request: Request) -> Placement | None:
        if request.required_node is not None:
            return None
        fitting = Fitting.of(cluster, request)
        assert fitting.first() is next(cluster.candidates(request), None)
        listed = [fitting.nth(number) for number in range(fitting.count())]
        assert listed == [node.index for node in cluster.candidates(request)]
        if not listed:
            return None
        node = cluster.nodes[listed[-1]]
        return Placement(node.name, node.pick_gpus(request))

    play(ClusterState(WIDE), last_that_fits, script)


def tightest_or_least_left(node: NodeState, request: Request) -> float:
    """Measure what best fit minimises: whole free GPUs, the free milli of one GPU, or the fractions left."""
    if request.gpus:
        if request.gpu_milli == 1000:
            return node.whole_free
        return min(node.gpu_free[gpu_id] for gpu_id in node.eligible_gpus(request))
    asked = [(name, amount) for name, amount in request.resources.items() if amount]
    return sum((node.free[name] - amount) / node.node.resources[name] for name, amount in asked)


MEASURES: dict[str, Measure] = {
    "best_fit": tightest_or_least_left,
    "least_loaded": lambda node, request: len(node.leases),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MEASURES)
@settings(max_examples=120)
@given(script=steps)
def test_kept_measures_choose_as_measuring_all_nodes(name: str, script: list[tuple[str, object]]) -> None:
    def least_of_all(cluster: ClusterState, request: Request) -> Placement | None:
        fitting = cluster.candidates(request)
        best = min(fitting, key=lambda node: MEASURES[name](node, request), default=None)
        return None if best is None else Placement(best.name, best.pick_gpus(request))

    expected = play(ClusterState(WIDE), least_of_all, script)
    assert play(ClusterState(WIDE), get_policy(name), script) == expected


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(script=steps)
def test_a_policy_keeps_its_contract(name: str, script: list[tuple[str, object]]) -> None:
    """Capacity is never exceeded, a request that fits a node is placed, and the state alone decides."""

    def checked(cluster: ClusterState, request: Request) -> Placement | None:
        before = cluster.snapshot()
        placement = policy(cluster, request)
        assert cluster.snapshot() == before
        assert (placement is None) == (next(cluster.candidates(request), None) is None)
        stranger = ClusterState.from_snapshot(before)
        assert policy(stranger, request) == placement
        return placement

    policy = get_policy(name)
    play(ClusterState(NODES), checked, script)


@pytest.mark.parametrize("name", POLICIES)
def test_what_rounding_left_of_a_resource_that_is_gone_stops_no_policy(name: str) -> None:
    """Of amounts that were subtracted and added again a little may be left, of which a server has none."""
    cluster = ClusterState([Node("a", 0, {"tb": 1.5, "cpus": 8}, (Gpu(0),))])
    amounts = {"first": 0.1, "second": 0.2, "third": 0.3, "fourth": 0.7}
    for lease_id, amount in amounts.items():
        request = Request(lease_id, resources={"tb": amount})
        cluster.apply(allocator.grant(cluster, request, (Placement("a"),), 0.0))
    cluster.apply(allocator.grant(cluster, Request("other"), (Placement("a"),), 0.0))
    cluster.apply(InventoryChanged((Node("a", 0, {"cpus": 8}, (Gpu(0),)),), 0.0))
    for lease_id in ("first", "third", "fourth", "second"):
        cluster.apply(*lease_steps.release(cluster, lease_id, 0.0))
    assert 0 < cluster.nodes[0].free["tb"] < 1e-10
    for gpus in (0, 1):
        placement = get_policy(name)(cluster, Request("t", gpus, resources={"tb": 1e-10, "cpus": 1}))
        assert placement == Placement("a", tuple(range(gpus)))


def test_fgd_places_what_leaves_a_thousand_gpus_without_cpus() -> None:
    cluster = ClusterState([Node("a", 0, {"cpus": 1024}, tuple(map(Gpu, range(1024))))])
    small = Request("t", 1, resources={"cpus": 1})
    cluster.apply(allocator.grant(cluster, small, (Placement("a", (0,)),), 0.0))
    assert fgd(cluster, Request("all", 1, resources={"cpus": 1023})) == Placement("a", (1,))


def test_scores_follow_the_undoing_of_a_trial() -> None:
    cluster, policy = ClusterState(NODES), weighted_fit_for(CORES)
    request = Request("x", 1, 500, {"cpus": 1})
    first = policy(cluster, request)
    with cluster.trial():
        for number in range(4):
            for change in allocator.allocate(
                cluster, named(request, f"y{number}"), SchedulingPass(policy, fifo, 0.0)
            ):
                cluster.apply(change)
    assert policy(cluster, request) == first


def test_scores_cover_exactly_the_nodes_that_fit() -> None:
    cluster = ClusterState(NODES)
    request = Request("x", 1, 500, {"cpus": 1}, ("T4",))
    assert gpu_packing.scores(cluster, request) == {"a": 31, "b": 31, "d": 30}


@pytest.mark.parametrize(("name", "scored"), [("gpu_packing", True), ("fgd", True), ("first_fit", False)])
def test_explain_shows_the_scores(name: str, scored: bool) -> None:
    with GPUResourceManager.from_url("memory://", policy=name) as manager:
        manager.allocate_resources("held", 4, 8)
        answer = manager.explain("x", 2, 4)
    scores = {server["server_name"]: server["score"] for server in answer["servers"]}
    if scored:
        assert answer["server_name"] is not None
        assert scores[answer["server_name"]] == max(score for score in scores.values() if score is not None)
    else:
        assert set(scores.values()) == {None}


def test_only_a_policy_that_draws_takes_the_seed() -> None:
    assert get_policy("random") is POLICIES["random"]
    assert get_policy("random", seed=3) == random.with_seed(3) != get_policy("random", seed=4)
    assert get_policy("first_fit", seed=3) is POLICIES["first_fit"]
    assert [name for name in POLICIES if takes_seed(POLICIES[name])] == ["random"]


def test_fragmentation_computed_by_hand() -> None:
    """Half of the tasks ask for both GPUs, half for half a GPU: F averages the milli that each cannot use."""
    measure = Fragmentation({TaskClass(4, 1000, 2, ()): 1, TaskClass(4, 500, 1, ()): 1})
    # 1000 + 300 free: the first class cannot use any of the 1300, the second not the 300.
    assert measure.amount(("T4",), [1000, 300], measure.cpu_step(8)) == (1300 + 300) / 2
    assert measure.amount(("T4",), [1000, 1000], measure.cpu_step(8)) == 0
    # Without enough CPU neither class can use any.
    assert measure.amount(("T4",), [1000, 1000], measure.cpu_step(3)) == 2000


def test_fragmentation_of_mixed_types() -> None:
    measure = Fragmentation({TaskClass(1, 1000, 1, ("V100",)): 1})
    assert measure.amount(("T4", "V100"), [1000, 1000], measure.cpu_step(1)) == 1000
    assert measure.amount(("T4",), [1000, 1000], measure.cpu_step(1)) == 2000


def test_fgd_packs_gpu_fractions_to_keep_whole_gpus_free() -> None:
    """A GPU fraction goes to a GPU already in use: the other GPU stays whole for tasks that need one."""
    cluster = ClusterState(NODES[:1])
    policy = fgd_for(Fragmentation({TaskClass(1, 1000, 1, ()): 1, TaskClass(1, 300, 1, ()): 1}))
    for number in range(3):
        for change in allocator.allocate(
            cluster, Request(f"t{number}", 1, 300, {"cpus": 1}), SchedulingPass(policy, fifo, 0.0)
        ):
            cluster.apply(change)
    assert [lease.placement.gpu_ids for lease in cluster.leases.values()] == [(0,)] * 3


def test_fgd_by_name_caches_its_task_mix_on_the_state() -> None:
    cluster = ClusterState(NODES)
    first = fgd(cluster, Request("x", 2, 1000, {"cpus": 1}))
    assert first is not None
    assert cluster.policy_cache


@pytest.mark.parametrize(
    ("fall", "score"), [(0.0, 50), (-1e-12, 49), (1000.0, 73), (-8000.0, 0), (-1_024_000.0, 0)]
)
def test_the_fgd_score_is_truncated_to_an_integer(fall: float, score: int) -> None:
    assert logistic_score(fall) == score


@pytest.mark.parametrize("name", POLICIES)
def test_required_labels_are_kept_also_between_nodes_in_equal_states(name: str) -> None:
    labelled = [replace(node, labels={"slot": node.name}) for node in TWINS]
    cluster = ClusterState(labelled)
    for number in (3, 1, 2, 0):
        request = Request(f"t{number}", 2, resources={"cpus": 1}, labels_required={"slot": f"twin{number}"})
        [change] = allocator.allocate_in_order(
            cluster, [request], SchedulingPass(get_policy(name), get_order("fifo"), 0.0)
        )
        assert isinstance(change, Granted)
        assert change.lease.placement.node == f"twin{number}"
        cluster.apply(change)
