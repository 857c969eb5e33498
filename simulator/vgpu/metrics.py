"""Metrics of a run: SLO, interference, utilisation and limiter figures, and their spread over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.stats import over_seeds, percentile
from simulator.vgpu.results import GATES, ScenarioRun, TaskOutcome

IR_LIMITS = {"over_1_25": 1.25, "over_1_5": 1.5, "over_2": 2.0}
STATES = ("completed", "overtime", "unfinished", "never_started")


def summarise(run: ScenarioRun) -> dict[str, Any]:
    """Return the metrics of one run, as plain values; None if no task contributes.

    `ir` counts every task that started, dropped ones included, as the original does; `ir_finished` only
    completed tasks; `slowdown` like `ir`, but from arrival, so that time in the queue counts. `duration`
    figures are of tasks that started; those of `duration_all` count tasks that never started too, from their
    arrival to the end of the run, as the public simulator does.
    """
    outcomes = run.outcomes
    states = Counter(outcome.state for outcome in outcomes)
    durations = values_of(outcomes, "duration_s")
    durations_all = [*durations, *(each.end_s - each.arrival_s for each in outcomes if each.start_s is None)]
    return {
        "tasks": len(outcomes),
        "started": len(durations),
        "states": {state: states[state] for state in STATES},
        "slo_rate": share(sum(outcome.slo_met for outcome in outcomes), len(outcomes)),
        "slo_violations": sum(not outcome.slo_met for outcome in outcomes),
        "drop_rate": share(len(outcomes) - states["completed"], len(outcomes)),
        "drop_count": len(outcomes) - states["completed"],
        "ir": ratio_figures(values_of(outcomes, "interference_ratio")),
        "ir_finished": ratio_figures(
            values_of([each for each in outcomes if each.state == "completed"], "interference_ratio")
        ),
        "slowdown": ratio_figures(values_of(outcomes, "slowdown")),
        "duration_p95_s": percentile(durations, 95),
        "duration_p99_s": percentile(durations, 99),
        "duration_all_p95_s": percentile(durations_all, 95),
        "duration_all_p99_s": percentile(durations_all, 99),
        "limiter_events": {gate: sum(each.limiter_events[gate] for each in outcomes) for gate in GATES},
        "limited_tasks": sum(any(each.limiter_events.values()) for each in outcomes),
        "nodes": {
            node: {
                "utilization": {d: use.mean for d, use in dimensions.items()},
                "stability": {d: use.std for d, use in dimensions.items()},
                "peak": {d: use.peak for d, use in dimensions.items()},
            }
            for node, dimensions in run.utilisation.items()
        },
    }


def values_of(outcomes: Sequence[TaskOutcome], name: str) -> list[float]:
    """Return that ratio, or the duration, of every task that started."""
    return [value for outcome in outcomes if (value := getattr(outcome, name)) is not None]


def ratio_figures(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean, tail percentiles and the fractions above each limit."""
    return {
        "mean": float(np.mean(values)) if values else None,
        "p95": percentile(values, 95),
        "p99": percentile(values, 99),
        **{
            name: share(sum(value > limit for value in values), len(values))
            for name, limit in IR_LIMITS.items()
        },
    }


def share(part: int, whole: int) -> float | None:
    """Return part / whole; None if `whole` is 0."""
    return part / whole if whole else None


MAX_BUCKETS = 10_000


def histogram(values: Sequence[float], bucket: float) -> list[dict[str, float]]:
    """Count values in buckets [`from`, `to`), without gaps; those beyond `MAX_BUCKETS` in the last."""
    if not values:
        return []
    # The tolerance puts 1.1 into the bucket that begins at 1.1, though 1.1 / 0.1 is below 11.
    counts = Counter(min(math.floor(value / bucket + 1e-9), MAX_BUCKETS) for value in values)
    return [
        {"from": round(i * bucket, 9), "to": round((i + 1) * bucket, 9), "tasks": counts[i]}
        for i in range(min(counts), max(counts) + 1)
    ]


HEADLINES = {
    "ir_over_1_25": ("ir", "over_1_25"),
    "ir_over_1_5": ("ir", "over_1_5"),
    "ir_over_2": ("ir", "over_2"),
    "ir_mean": ("ir", "mean"),
    "ir_p95": ("ir", "p95"),
    "ir_p99": ("ir", "p99"),
    "ir_finished_over_1_25": ("ir_finished", "over_1_25"),
    "slowdown_p95": ("slowdown", "p95"),
    **{
        name: (name,)
        for name in (
            "slo_rate",
            "slo_violations",
            "drop_rate",
            "drop_count",
            "started",
            "limited_tasks",
            "duration_p95_s",
            "duration_p99_s",
            "duration_all_p95_s",
            "duration_all_p99_s",
        )
    },
}
"""Name of a figure collected over seeds -> its path in the result of `summarise`."""


def pick(summary: dict[str, Any], path: Sequence[str]) -> Any:
    """Return the value at that path of keys."""
    value: Any = summary
    for key in path:
        value = value[key]
    return value


def collect(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collect the runs of one scenario: a list over seeds for every figure, means for utilisation."""
    nodes = summaries[0]["nodes"]
    return {
        **{name: [pick(each, path) for each in summaries] for name, path in HEADLINES.items()},
        "limiter_events": {gate: [each["limiter_events"][gate] for each in summaries] for gate in GATES},
        "utilization": {
            node: {
                d: float(np.mean([each["nodes"][node]["utilization"][d] for each in summaries]))
                for d in nodes[node]["utilization"]
            }
            for node in nodes
        },
        "confidence": {
            name: over_seeds([pick(each, path) for each in summaries]) for name, path in HEADLINES.items()
        },
    }
