"""Properties: the engine equals the reference and keeps the invariants, over random cases."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.serverless.config import ClusterConfig, NumaNodes, ServerType
from simulator.serverless.container import Container
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.template import WorkflowTemplate
from tests.simulator.serverless.cases import CORE_SPEED, Case, cases
from tests.simulator.serverless.reference import simulate

many = settings(max_examples=1200)
some = settings(max_examples=150)


@some
@given(cases())
def test_the_engine_equals_the_reference(case: Case) -> None:
    equals_the_reference(case)


@pytest.mark.e2e
@many
@given(cases())
def test_the_engine_equals_the_reference_over_many_cases(case: Case) -> None:
    equals_the_reference(case)


def equals_the_reference(case: Case) -> None:
    expected = simulate(case.arrivals, case.templates, case.config, case.decisions)
    logs = case.play(case.env())
    ends = {(r.wf_id, r.fn_id): r for log in logs for r in log.finished_function_records}
    found = [
        (log.wf_id, log.fn_id, log.submission_time, log.creation_time,
         ends[log.wf_id, log.fn_id].start_time, ends[log.wf_id, log.fn_id].completion_time)
        for log in logs
    ]  # fmt: skip
    assert found == [
        (run.workflow, run.function, run.submission, run.creation, run.start, run.end)
        for run in expected.runs
    ]
    assert [log.rent for log in logs] == expected.rents


@some
@given(cases(), st.sampled_from([1, 100, 100_000]))
def test_the_bound_is_never_below_the_prediction(case: Case, faster: int) -> None:
    """On faster cores, with more work, rounding matters less, and the bound is tighter."""
    for template in case.templates:
        work = tuple(faster * operations for operations in template.computations)
        object.__setattr__(template, "computations", work)
    config = case.config.model_copy(update={"single_core_speed": faster * CORE_SPEED})
    env = Case(case.arrivals, case.templates, config, case.decisions).env()
    for decision in itertools.cycle(case.decisions):
        env.step_at(*decision)
        for node in env.cluster.nodes:
            assert node.predicted_end() <= node.latest_end_bound.latest + 1e-6
            node.tighten_bound()
            assert node.predicted_end() <= node.latest_end_bound.latest + 1e-6
        if env.current_function is None:
            break


def test_a_waiting_container_adds_no_rent_by_rounding() -> None:
    """A node is rented for exactly one hour of work; a container that arrives and waits adds no rent."""
    hour = WorkflowTemplate((3600 * CORE_SPEED,), (1,), (1,))
    nothing = WorkflowTemplate((0,), (1,), (1,))
    server = ServerType(
        name="a",
        count=1,
        hourly_rate=1.0,
        cold_start_latency=0.0,
        numa_nodes=NumaNodes(count=1, cpu=1, memory=8),
    )
    config = ClusterConfig(single_core_speed=CORE_SPEED, servers=(server,))
    case = Case([0.0, 1.0636582623795903], [hour, nothing], config, [(0, 5)])
    assert [log.rent for log in case.play(case.env())] == [1.0, 0.0]
    equals_the_reference(case)


def containers(env: RawEnv, kept: dict[tuple[int, int], Container]) -> None:
    for node in env.cluster.nodes:
        for container in node.running_containers:
            kept[container.wf_id, container.fn_id] = container


@some
@given(cases())
def test_invariants_hold_over_an_episode(case: Case) -> None:
    env = case.env()
    kept: dict[tuple[int, int], Container] = {}
    logs: list[EnvLog] = []
    while env.current_function is not None:
        logs.append(env.step_at(*case.decisions[len(logs) % len(case.decisions)]))
        containers(env, kept)
        for node in env.cluster.nodes:
            used = sum(container.memory_alloc for container in node.running_containers)
            assert node.free_memory == node.memory - used >= 0
        for server in env.cluster.servers:
            assert server.latest_finished_time <= server.expiration_time
        for record in logs[-1].finished_function_records:
            log = next(log for log in logs if (log.wf_id, log.fn_id) == record[:2])
            assert record.completion_time <= env.cluster[log.server_name][log.server_id].expiration_time
    assert not env.events
    memory_is_never_negative(env)
    work_done_equals_work_requested(env, kept)
    no_container_overtakes(logs)
    predecessors_come_first(env, case)


def memory_is_never_negative(env: RawEnv) -> None:
    for node in env.cluster.nodes:
        records = node.utilization.records
        assert all(0 <= record.free_memory <= node.memory for record in records)
        assert [r.timestamp for r in records] == sorted({r.timestamp for r in records})
        assert records[-1].free_memory == node.memory


def work_done_equals_work_requested(env: RawEnv, kept: dict[tuple[int, int], Container]) -> None:
    """Check that the records account for every operation; rounding may lose the last one."""
    for container in kept.values():
        function = container.function
        assert function is env.workload[container.wf_id][container.fn_id]
        node = env.cluster.nodes[function.position]
        done = node.execution_speeds.get_completed_computation(container, function.completion_time)
        assert container.computation - 1 <= done <= container.computation


def no_container_overtakes(logs: list[EnvLog]) -> None:
    starts = {(r.wf_id, r.fn_id): r.start_time for log in logs for r in log.finished_function_records}
    by_node: dict[tuple[str, int, int], list[tuple[float, int, float]]] = {}
    for order, log in enumerate(logs):
        where = log.server_name, log.server_id, log.numa_node_id
        by_node.setdefault(where, []).append((log.creation_time, order, starts[log.wf_id, log.fn_id]))
    for created in by_node.values():
        begun = [start for _, _, start in sorted(created)]
        assert begun == sorted(begun)
        assert all(start >= creation for creation, _, start in created)


def predecessors_come_first(env: RawEnv, case: Case) -> None:
    for workflow in env.workload:
        for fn_id in range(len(workflow)):
            parents = [
                workflow[parent].completion_time for parent, _ in workflow.template.predecessors[fn_id]
            ]
            latest = max((time for time in parents if time is not None), default=workflow.arrival_time)
            assert workflow[fn_id].submission_time == latest
            start = workflow[fn_id].start_time
            assert start is not None
            assert start >= latest
            assert not math.isinf(start)


@some
@given(cases())
def test_a_restored_snapshot_continues_as_the_original(case: Case) -> None:
    env = case.env()
    logs = []
    for step in range(3):
        if env.current_function is not None:
            logs.append(env.step_at(*case.decisions[step % len(case.decisions)]))
    snapshot = env.snapshot()
    straight = case.play(env)
    env.restore(snapshot)
    assert pickle.dumps(case.play(env)) == pickle.dumps(straight)
    other = case.env()
    other.restore(snapshot)
    assert pickle.dumps(case.play(other)) == pickle.dumps(straight)
