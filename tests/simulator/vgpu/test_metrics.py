"""Metrics of a run, calculated by hand from four tasks with different outcomes."""

from __future__ import annotations

import pytest

from simulator.stats import over_seeds
from simulator.vgpu.metrics import histogram, summarise
from simulator.vgpu.page import _contrast
from simulator.vgpu.results import ScenarioRun, TaskOutcome
from tests.simulator.vgpu.small import profile, scenario


def outcome(
    state: str, arrival_s: float, start_s: float | None, end_s: float, slo_met: bool = False
) -> TaskOutcome:
    """Return the outcome of a task whose work takes 10 s at its mean demand."""
    events = {"memory": 0, "bandwidth": 0, "compute": 3 if state == "overtime" else 0}
    return TaskOutcome(state, "any", state, "n", arrival_s, start_s, end_s, 10.0, slo_met, events)


FOUR = (
    outcome("completed", 0.0, 6.0, 19.0, slo_met=True),  # ran 13 s, waited 6 s
    outcome("overtime", 0.0, 0.0, 21.0),
    outcome("unfinished", 50.0, 52.0, 60.0),
    outcome("never_started", 55.0, None, 60.0),
)


def test_ratios_count_started_tasks_and_rates_count_all() -> None:
    where = scenario(profile("any", 10, 10, 10, work=100, deadline=14))
    figures = summarise(ScenarioRun(where, 0, (), FOUR, {}))
    assert (figures["tasks"], figures["started"]) == (4, 3)
    assert figures["slo_rate"] == 1 / 4
    assert figures["drop_rate"] == 3 / 4
    assert figures["ir"]["mean"] == pytest.approx((1.3 + 2.1 + 0.8) / 3)
    assert [figures["ir"][name] for name in ("over_1_25", "over_1_5", "over_2")] == [2 / 3, 1 / 3, 1 / 3]
    assert (figures["ir_finished"]["mean"], figures["ir_finished"]["over_1_25"]) == (1.3, 1.0)
    assert figures["slowdown"]["mean"] == pytest.approx((1.9 + 2.1 + 1.0) / 3)
    assert figures["limited_tasks"] == 1
    assert (figures["slo_violations"], figures["drop_count"]) == (3, 3)
    assert figures["limiter_events"]["compute"] == 3


def test_durations_are_of_started_tasks_or_of_all_as_their_name_says() -> None:
    where = scenario(profile("any", 10, 10, 10, work=100, deadline=14))
    figures = summarise(ScenarioRun(where, 0, (), FOUR, {}))
    # Started: 8, 13, 21 s. The public simulator also counts the task that waited 5 s in vain.
    assert figures["duration_p95_s"] == pytest.approx(13 + 0.9 * 8)
    assert figures["duration_all_p95_s"] == pytest.approx(13 + 0.85 * 8)


def test_a_bucket_begins_with_its_lower_edge() -> None:
    """In floating point 1.1 / 0.1 is slightly below 11, and 0.3 / 0.1 below 3."""
    assert histogram([0.3, 0.35, 0.6, 1.1], 0.1) == [
        {"from": round(k / 10, 9), "to": round((k + 1) / 10, 9), "tasks": {3: 2, 6: 1, 11: 1}.get(k, 0)}
        for k in range(3, 12)
    ]


def test_a_histogram_has_no_more_buckets_than_a_file_can_hold() -> None:
    found = histogram([0.05, 1e300], 0.1)
    assert (len(found), found[0]["tasks"], found[-1]["tasks"]) == (10_001, 1, 1)


def test_no_scenario_is_named_best_where_the_confidence_intervals_overlap() -> None:
    def said(*runs: list[float]) -> str:
        spreads = {f"A{number}": over_seeds(values) for number, values in enumerate(runs, 1)}
        return _contrast("slo", spreads, max, min, "en")

    assert "and the confidence intervals overlap" in said([0.43, 0.509, 0.58], [0.44, 0.512, 0.59])
    low, high = [0.50, 0.51, 0.52], [0.80, 0.81, 0.82]
    assert said(low, high).startswith("Most tasks meet their deadline in A2")
    assert said(low, [0.65, 0.66, 0.67], high).startswith("Most tasks meet their deadline in A3")
    for between in ([0.79, 0.80, 0.81], [0.51, 0.52, 0.53]):
        assert said(low, between, high).startswith("More tasks meet their deadline in A3 (81.0 %) than in A1")
