"""The measure of estimated runtimes: what it counts, and that no estimate knows the future."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.estimates import TRACES, Run, estimates, sample_runs, score
from resource_manager.core.models import Request


@pytest.fixture(scope="module")
def sample() -> list[Run]:
    return sorted(sample_runs(), key=lambda run: run.started_at)


def test_the_sample_history_is_estimated_as_well_as_promised(sample: list[Run]) -> None:
    found = score(list(estimates(sample))[200:])
    assert found["estimates"] == 200
    assert found["unknown_percent"] == 0
    assert found["coverage_percent"] == pytest.approx(80, abs=3)
    assert found["of_plain_loss"] < 0.9
    assert found["of_plain_width"] < 1


def test_openb_is_covered_overall_and_in_each_large_group(shared_data: Path) -> None:
    found = list(estimates(TRACES["openb"](shared_data / "openb")))
    figures = score(found[len(found) // 2 :])
    assert figures["coverage_percent"] == pytest.approx(80, abs=3)
    assert len(figures["coverage_by_group"]) >= 4
    assert all(73 <= percent <= 87 for percent in figures["coverage_by_group"].values())
    assert figures["calibrated_coverage_percent"] == pytest.approx(80, abs=3), (
        "plain ones, as wide as it takes"
    )
    assert figures["of_calibrated_loss"] < 0.9
    assert figures["of_calibrated_width"] < 1.1


def test_no_estimate_knows_what_comes_after_it(sample: list[Run]) -> None:
    now = sample[200].started_at
    coming = [run for run in sample if run.ended_at > now]
    seconds = [run.ended_at - now for run in coming]
    random.Random(1).shuffle(seconds)
    other = [
        *(run for run in sample if run.ended_at <= now),
        *(
            replace(run, ended_at=max(now, run.started_at) + left_s)
            for run, left_s in zip(coming, seconds, strict=True)
        ),
    ]

    def until_now(runs: list[Run]) -> list[object]:
        return [each.model for each in estimates(runs) if each.run.started_at <= now]

    assert until_now(other) == until_now(sample)


def test_plain_quantiles_that_are_exact_leave_no_ratio() -> None:
    runs = [Run(Request(f"a_{number}", 1), 100.0 * number, 100.0 * number + 60) for number in range(40)]
    found = score(list(estimates(runs))[20:])
    assert found["of_plain_loss"] is None
    assert found["loss_s"] == pytest.approx(0, abs=1e-6)
    assert found["coverage_percent"] == 100
