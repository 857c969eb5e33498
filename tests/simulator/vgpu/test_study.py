"""Expected results of the scenarios, on a few of the study's forty seeds."""

from __future__ import annotations

from statistics import mean
from typing import Any

from simulator.vgpu.metrics import summarise
from simulator.vgpu.scenario import load_scenario
from simulator.vgpu.simulation import simulate

SEEDS = range(1, 5)


def shares(name: str, figure: str = "over_1_25", **changes: Any) -> list[float]:
    """Return one IR figure (default: fraction of started tasks above 1.25) per seed, at the study's load."""
    scenario = load_scenario(name, {"tasks": 160, "arrival": "poisson_burst", "duration_s": 320, **changes})
    return [summarise(simulate(scenario, seed))["ir"][figure] for seed in SEEDS]


def test_without_isolation_a_few_percent_suffer_interference_and_with_the_sandbox_none() -> None:
    assert 0.03 <= mean(shares("A1")) <= 0.07
    assert shares("A3") == [0.0] * len(SEEDS)


def test_light_first_arbitration_alone_nearly_removes_interference() -> None:
    assert mean(shares("A1", arbitration="light_first")) < 0.01


def test_admission_by_usage_admits_more_than_the_sandbox_can_isolate() -> None:
    usage = {"scheduling.admission": "usage"}
    assert mean(shares("A3", **usage)) < 0.02 < mean(shares("A1", **usage))


def test_the_bandwidth_gate_matters_only_if_bandwidth_limits_progress() -> None:
    assert shares("A4", "p99") == shares("A3", "p99")
    with_gate = shares("A3", "p99", progress="bottleneck")
    without = shares("A4", "p99", progress="bottleneck")
    assert all(worse > better for worse, better in zip(without, with_gate, strict=True))
