"""What must come out of the scenarios, on a few of the study's forty seeds."""

from __future__ import annotations

from statistics import mean
from typing import Any

from simulator.vgpu.metrics import summarise
from simulator.vgpu.scenario import load_scenario
from simulator.vgpu.simulation import simulate

SEEDS = range(1, 5)


def shares(name: str, figure: str = "over_1_25", **changes: Any) -> list[float]:
    """That IR figure (the share of started tasks above 1.25), one a seed, at the study's load."""
    scenario = load_scenario(name, {"tasks": 160, "arrival": "poisson_burst", "duration_s": 320, **changes})
    return [summarise(simulate(scenario, seed))["ir"][figure] for seed in SEEDS]


def test_without_isolation_a_few_in_a_hundred_are_held_up_and_the_sandbox_ends_that() -> None:
    assert 0.03 <= mean(shares("A1")) <= 0.07
    assert shares("A3") == [0.0] * len(SEEDS)


def test_light_first_arbitration_would_do_as_well() -> None:
    assert mean(shares("A1", arbitration="light_first")) < 0.01


def test_a_ledger_of_usage_admits_more_than_the_sandbox_can_hold_apart() -> None:
    usage = {"scheduling.admission": "usage"}
    assert mean(shares("A3", **usage)) < 0.02 < mean(shares("A1", **usage))


def test_the_link_gate_shows_only_where_bandwidth_holds_progress_up() -> None:
    assert shares("A4", "p99") == shares("A3", "p99")
    with_gate = shares("A3", "p99", progress="bottleneck")
    without = shares("A4", "p99", progress="bottleneck")
    assert all(worse > better for worse, better in zip(without, with_gate, strict=True))
