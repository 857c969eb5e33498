"""What requests without a known start hold back, and what they leave to those behind them."""

from __future__ import annotations

import pytest

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.scheduling.queue.backfill import MAX_AHEAD, MAX_RESERVATIONS
from resource_manager.scheduling.queue.held_back import HeldBack
from tests.builders import hold, node, nodes
from tests.scheduling.queue.test_backfill import ask, passes


def test_gpus_of_the_kind_and_all_amounts_are_held_back_on_the_nodes_of_the_mask() -> None:
    cluster = ClusterState(
        [Node(name, i, {"cpus": 8}, (Gpu(0, "A100"), Gpu(1, "V100"))) for i, name in enumerate("ab")]
    )
    held_back = HeldBack(cluster)
    assert not held_back.mask
    typed = Request("typed", 1, resources={"cpus": 3}, gpu_types=("A100",))
    assert held_back.add(typed, 0b10)
    assert (held_back.mask, held_back.gpus_mask) == (0b10, 0)
    assert held_back.add(Request("more", 1, resources={"cpus": 4}, gpu_types=("A100",)), 0b10)
    assert not held_back.add(Request("no more", 1, gpu_types=("A100",)), 0b10)
    first, second = cluster.nodes
    assert held_back.left(first, first.capacity) == first.capacity
    left = held_back.left(second, second.capacity)
    assert (dict(left.gpus), left.amounts) == ({0: 0, 1: 1000}, {"cpus": 1})


@pytest.mark.parametrize("runtime_s", [None, 100.0])
def test_a_request_for_a_full_server_leaves_the_others_to_those_behind(runtime_s: float | None) -> None:
    cluster = ClusterState(nodes("ab", 8))
    hold(cluster, ask("full", 8, runtime_s), "a", *range(8))
    head = ask("head", 8, required_node="a")
    assert passes(cluster, head, ask("on b", 4), ask("on b too", 4), ask("late", 1)) == ["on b", "on b too"]


def test_a_request_for_a_type_or_a_label_leaves_the_other_servers_to_those_behind() -> None:
    cluster = ClusterState(
        [
            Node("a", 0, {}, (Gpu(0, "A100"),), labels={"rack": "1"}),
            Node("v", 1, {}, (Gpu(0, "V100"),), labels={"rack": "2"}),
            Node("w", 2, {}, (Gpu(0, "V100"),), labels={"rack": "3"}),
        ]
    )
    hold(cluster, ask("endless", 1), "a", 0)
    hold(cluster, ask("endless too", 1), "v", 0)
    typed, labelled = ask("typed", 1, gpu_types=("A100",)), ask("labelled", 1, labels_required={"rack": "2"})
    assert passes(cluster, typed, labelled, ask("any", 1)) == ["any"]


def test_a_request_for_gpus_of_one_kind_leaves_those_of_another_kind_of_the_same_server() -> None:
    cluster = ClusterState([Node("mixed", 0, {}, (Gpu(0, "A100"), Gpu(1, "V100")))])
    hold(cluster, ask("endless", 1), "mixed", 0)
    assert passes(cluster, ask("typed", 1, gpu_types=("A100",)), ask("any", 1)) == ["any"]


def test_a_gang_of_unknown_start_holds_back_the_idle_servers_that_it_could_use_and_no_others() -> None:
    gpus = tuple(Gpu(gpu_id, "H100") for gpu_id in range(8))
    cluster = ClusterState(
        [Node(f"h{i}", i, {}, gpus, f"10.0.0.{i}") for i in range(4)]
        + [Node("old", 4, {}, tuple(Gpu(gpu_id, "V100") for gpu_id in range(8)), "10.0.0.9")]
    )
    hold(cluster, ask("endless", 1), "h0", 0)
    gang = ask("gang", 8, nodes=4, gpu_types=("H100",))
    late = [ask("a", 1), ask("b", 1), ask("c", 8), ask("typed", 1, gpu_types=("H100",))]
    assert passes(cluster, gang, *late) == ["a", "b"], "on the old one; 31 idle H100 are kept"


def test_what_it_does_not_ask_for_is_not_held_back() -> None:
    cluster = ClusterState([node("a", 8, 64)])
    hold(cluster, ask("endless", 4, cpus=4), "a", 0, 1, 2, 3)
    head = ask("head", 8, cpus=30)
    assert passes(cluster, head, ask("gpu", 1, 1.0), ask("cpus", 0, cpus=30), ask("more", 0, cpus=1)) == [
        "cpus"
    ], "30 of the 60 free CPUs are kept, and all GPUs"


def test_those_behind_all_reservations_hold_back_nothing() -> None:
    def starts(ahead: int, runtime_s: float) -> bool:
        cluster = ClusterState(nodes("ab", 8))
        hold(cluster, ask("full", 8, 100.0), "a", *range(8))
        hold(cluster, ask("half", 4, 100.0), "b", *range(4))
        waiting = [ask(f"w{number}", 8, 10.0, required_node="a") for number in range(ahead)]
        late = ask("late", 8, 10.0, required_node="b")
        return passes(cluster, *waiting, late, ask("small", 4, runtime_s)) == ["small"]

    assert starts(MAX_RESERVATIONS - 1, 100.0)
    assert not starts(MAX_RESERVATIONS - 1, 1000.0), "the last reservation is for the late one, at 100"
    assert starts(MAX_RESERVATIONS, 1000.0)


def test_a_long_queue_for_some_servers_keeps_nobody_from_others() -> None:
    cluster = ClusterState(nodes("ab", 8))
    hold(cluster, ask("half", 4), "a", *range(4))
    waiting = [ask(f"w{number}", 8, 10.0, required_node="a") for number in range(MAX_AHEAD + 10)]
    late = [ask("brief", 4, 5.0, required_node="a"), ask("elsewhere", 8, required_node="b")]
    assert passes(cluster, *waiting, *late) == ["elsewhere"]
