"""The example of the original document, number for number, with its one error corrected."""

from __future__ import annotations

import pytest

from simulator.serverless.container import Container
from simulator.serverless.numa_node import NumaNode, predict_ends
from simulator.serverless.server import Server
from simulator.serverless.workflow import Function


def container(name: int, parallelism: int, required: int, given: int, work: int, at: float) -> Container:
    function = Function(0, name, work, required, parallelism)
    function.submit(at)
    return Container(function, given)


A, B, C, D = range(4)


@pytest.fixture
def node() -> NumaNode:
    """Return four cores of 1000 operations per second and 8192 MiB, with A and B running since 0."""
    node = NumaNode(0, cpu=4, memory=8192, single_core_speed=1000)
    start(node, container(A, 1, 512, 512, 2585, 0.0))
    start(node, container(B, 2, 1024, 1536, 7171, 0.0))
    return node


def start(node: NumaNode, container: Container) -> None:
    node.on_container_creation(container)
    node.start(container)


def remaining(node: NumaNode) -> dict[int, int]:
    return {c.fn_id: c.remaining_computation for c in node.running_containers}


def ends(node: NumaNode) -> dict[int, float]:
    """Return the ends at the current speeds, as the document states them."""
    now = node.cores.now
    return {
        c.fn_id: now + c.remaining_computation / node.execution_speeds.records(c)[-1].speed
        for c in node.running_containers
    }


def speeds(node: NumaNode) -> dict[int, int]:
    return {c.fn_id: node.execution_speeds.records(c)[-1].speed for c in node.running_containers}


def cpu(node: NumaNode) -> float:
    return node.utilization.records[-1].cpu


def test_the_example_gives_the_documented_numbers(node: NumaNode) -> None:
    assert speeds(node) == {A: 1000, B: 2000}
    assert cpu(node) == 0.75
    assert ends(node) == {A: 2.585, B: 3.5855}

    start(node, container(C, 4, 1024, 1024, 1142, 1.0))
    assert node.cores.now == 1.0
    assert node.cores.parallelism == 7
    assert speeds(node) == {A: 571, B: 1142, C: 2284}
    assert cpu(node) == 0.99925
    assert remaining(node) == {A: 1585, B: 5171, C: 1142}
    # The document prints 4.524 and 5.524 for B; 5171 / 1142 is 4.528.
    expected = {A: 3.776, B: 5.528, C: 1.5}
    assert {name: round(end, 3) for name, end in ends(node).items()} == expected

    assert node.on_container_completion().fn_id == C
    assert node.cores.now == 1.5
    assert speeds(node) == {A: 1000, B: 2000}
    assert cpu(node) == 0.75
    assert remaining(node) == {A: 1300, B: 4600}
    assert ends(node) == {A: 2.8, B: 3.8}

    start(node, container(D, 2, 2048, 1536, 4200, 2.0))
    assert node.cores.now == 2.0
    assert speeds(node) == {A: 800, B: 1600, D: 1200}
    assert cpu(node) == 0.9
    assert remaining(node) == {A: 800, B: 3600, D: 4200}
    assert ends(node) == {A: 3.0, B: 4.25, D: 5.5}

    assert node.on_container_completion().fn_id == A
    assert node.cores.now == 3.0
    assert speeds(node) == {B: 2000, D: 1500}
    assert cpu(node) == 0.875
    assert remaining(node) == {B: 2000, D: 3000}
    assert ends(node) == {B: 4.0, D: 5.0}

    assert node.on_container_completion().fn_id == B
    assert node.cores.now == 4.0
    assert speeds(node) == {D: 1500}
    assert cpu(node) == 0.375
    assert remaining(node) == {D: 1500}
    assert ends(node) == {D: 5.0}

    assert node.on_container_completion().fn_id == D
    assert node.cores.now == 5.0
    assert node.running_containers == []
    assert [record.timestamp for record in node.utilization.records] == [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert [record.free_memory for record in node.utilization.records] == [
        6144, 5120, 6144, 4608, 5120, 6656, 8192,
    ]  # fmt: skip


def test_the_prediction_accounts_for_cores_freed_by_ends(node: NumaNode) -> None:
    """With C from 1.0 and no later container, A and B end at the documented times after the end of C."""
    node.on_container_creation(container(C, 4, 1024, 1024, 1142, 1.0))
    assert predict_ends(node) == pytest.approx({(0, C): 1.5, (0, A): 2.7995, (0, B): 3.8})


def test_speed_with_less_memory_than_required_is_computed_in_integers() -> None:
    """In floating point 64/192 x 800 x 3 is 799.99…, and its floor 799."""
    assert container(A, 3, 192, 64, 1, 0.0).speed(800) == 800


def test_memory_is_in_use_from_start_to_end(node: NumaNode) -> None:
    late = container(C, 1, 512, 512, 1, 1.0)
    node.on_container_creation(late)
    assert node.free_memory == 8192 - 512 - 1536
    node.start(late)
    assert node.free_memory == 8192 - 512 - 1536 - 512
    assert node.on_container_completion().fn_id == C
    assert node.free_memory == 8192 - 512 - 1536


def test_a_node_and_its_server_report_the_documented_properties(node: NumaNode) -> None:
    other = NumaNode(1, cpu=4, memory=8192, single_core_speed=1000)
    server = Server("c5", 0, 0.1, 0.5, [node, other])
    assert (node.computing_capacity, node.free_memory, server.container_count) == (4000, 6144, 2)
    assert (server.earliest_finished_nn_id, server.latest_finished_nn_id) == (0, 0)
    assert server.earliest_finished_time == 2.585
    assert server.latest_finished_time == pytest.approx(3.5855)
    start(node, container(C, 1, 8192, 8192, 1000, 1.0))
    assert [waiting.fn_id for waiting in node.waiting_containers] == [C]
    assert node.utilization.records[-1].free_memory == 6144
    idle = Server("c5", 1, 0.1, 0.5, [other])
    assert (idle.earliest_finished_nn_id, idle.latest_finished_nn_id) == (None, None)


def test_speed_records_agree_with_the_work_left(node: NumaNode) -> None:
    start(node, container(C, 4, 1024, 1024, 1142, 1.0))
    node.on_container_completion()
    assert len(node.running_containers) == 2
    for running in node.running_containers:
        done = node.execution_speeds.get_completed_computation(running, node.cores.now)
        assert running.computation - done == running.remaining_computation
