"""Cost of an event: independent of the number of earlier containers."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from simulator.serverless import ClusterConfig, RawEnv
from simulator.serverless.template import WorkflowTemplate

FUNCTIONS = 6


def calls_by_workflow(workflows: int) -> list[int]:
    """Count the Python calls for each workflow of a series without overlap."""
    template = WorkflowTemplate(
        (10**9,) * FUNCTIONS,
        (128,) * FUNCTIONS,
        (2,) * FUNCTIONS,
        ((0, 1, 5), (0, 2, 5), (1, 3, 5), (2, 3, 5)),
    )
    config = ClusterConfig(servers=ClusterConfig.c5().servers[:3])
    env = RawEnv([100.0 * wf_id for wf_id in range(workflows)], [template], config)
    env.reset(seed=0)
    made: Counter[int] = Counter()
    current = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made[current] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for decision in range(workflows * FUNCTIONS):
            current = decision // FUNCTIONS
            env.step_at(decision % FUNCTIONS % 4, 128)
    finally:
        sys.setprofile(before)
    assert len(env.cluster._events) == 0
    return [made[wf_id] for wf_id in range(workflows)]


def test_late_workflows_take_no_more_calls_than_early_ones() -> None:
    calls = calls_by_workflow(300)
    # A rental is extended now and then, which costs a prediction; the median must not grow.
    early, late = sorted(calls[10:60]), sorted(calls[-50:])
    assert late[25] <= early[25]
