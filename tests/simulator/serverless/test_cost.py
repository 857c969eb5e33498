"""Cost of an event: independent of the number of earlier containers, and of those that run."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from types import FrameType
from typing import Any

from simulator.serverless import ClusterConfig, RawEnv
from simulator.serverless.config import NumaNodes, ServerType
from simulator.serverless.template import WorkflowTemplate

FUNCTIONS = 6


def calls_by_workflow(env: RawEnv, nodes: int) -> list[int]:
    """Count the Python calls for each workflow; functions go to the first `nodes` nodes in turn."""
    env.reset(seed=0)
    made: Counter[int] = Counter()
    current = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made[current] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for decision in itertools.count():
            assert env.current_function is not None
            current = env.current_function.wf_id
            if env.step_at(decision % nodes, 128).terminated:
                break
    finally:
        sys.setprofile(before)
    assert not env.events, "nothing is left to come"
    return [made[wf_id] for wf_id in range(len(env.workload))]


def diamonds_without_overlap(workflows: int) -> list[int]:
    template = WorkflowTemplate(
        (10**9,) * FUNCTIONS,
        (128,) * FUNCTIONS,
        (2,) * FUNCTIONS,
        ((0, 1, 5), (0, 2, 5), (1, 3, 5), (2, 3, 5)),
    )
    config = ClusterConfig(servers=ClusterConfig.c5().servers[:3])
    return calls_by_workflow(RawEnv([100.0 * wf_id for wf_id in range(workflows)], [template], config), 4)


def one_burst(functions: int) -> list[int]:
    """One workflow of functions that all run at once on one node, with different work."""
    work = tuple(10**9 + 10**8 * fn_id for fn_id in range(functions))
    template = WorkflowTemplate(work, (128,) * functions, (1,) * functions)
    large = ServerType(
        name="large",
        count=1,
        hourly_rate=1.0,
        cold_start_latency=0.5,
        numa_nodes=NumaNodes(count=1, cpu=4, memory=128 * functions),
    )
    return calls_by_workflow(RawEnv([0.0], [template], ClusterConfig(servers=(large,))), 1)


def test_many_running_containers_take_no_more_calls_than_few() -> None:
    few, many = one_burst(100), one_burst(400)
    assert many[0] / 400 <= 1.1 * few[0] / 100


def test_late_workflows_take_no_more_calls_than_early_ones() -> None:
    calls = diamonds_without_overlap(300)
    # A rental is extended now and then, which costs a prediction; the median must not grow.
    early, late = sorted(calls[10:60]), sorted(calls[-50:])
    assert late[25] <= early[25]
