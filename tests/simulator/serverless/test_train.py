"""Fairness of the comparison with the heuristics: same episodes, same metrics."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from simulator.serverless.env import ServerlessEnv
from simulator.serverless.scheduler import PolicyScheduler, scheduler_policy
from simulator.serverless.train import make_env, mean, play, play_heuristic, random_actions
from simulator.serverless.workflow_shapes import generate_workflows


def test_heuristics_and_agents_are_measured_alike() -> None:
    """The decisions of the policy, taken in the environment, give the same return, makespan and rent."""
    env = ServerlessEnv((0.0, 1.0), generate_workflows(size=3))
    measured = play_heuristic(env, "least_loaded", seed=5)
    scheduler = PolicyScheduler(scheduler_policy("least_loaded", env.raw, 5))

    def choose(env: ServerlessEnv, seen: NDArray[np.float32]) -> NDArray[np.int64]:
        log = last[-1] if last else None
        if log is not None:
            scheduler.observe(log)
        position, memory_mib = scheduler.decide(env.raw)
        return np.array([position, env.memory_choices.index(memory_mib)])

    last = []
    step = env.step

    def stepping(action: NDArray[np.int64]) -> object:
        result = step(action)
        last.append(result[4]["log"])
        return result

    env.reset(seed=5)
    scheduler.reset(env.raw)
    env.step = stepping  # type: ignore[assignment,method-assign]
    assert play(env, choose, seed=5) == pytest.approx(measured)


def test_random_actions_are_worse_than_random_placement() -> None:
    env = make_env()
    drawn = mean([play(env, random_actions(seed), seed) for seed in range(5)])
    placed = mean([play_heuristic(env, "random", seed) for seed in range(5)])
    assert drawn["return"] < placed["return"] < 0
