"""Reports of a sweep: one JSON file per scenario, plots and the comparison page, each written atomically."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from simulator.io.files import write_json, write_text
from simulator.report import save_figure
from simulator.vgpu.metrics import collect, histogram, summarise, values_of
from simulator.vgpu.page import render_page
from simulator.vgpu.plots import Labels, draw_all
from simulator.vgpu.pool import build_nodes
from simulator.vgpu.results import Outcome, Run
from simulator.vgpu.scenario import as_tables


def write_reports(folder: Path, runs: Mapping[str, Sequence[Run]], bucket: float) -> list[Path]:
    """Write all reports on the runs (scenario -> one run per seed) into the folder; return the files."""
    from matplotlib import rc_context

    labels = Labels.for_this_machine()
    summaries = {name: [summarise(run) for run in each] for name, each in runs.items()}
    collected = {name: collect(each) for name, each in summaries.items()}
    titles = {name: (each[0].scenario.title, each[0].scenario.title_zh) for name, each in runs.items()}
    seeds = [run.seed for run in next(iter(runs.values()))]
    files: dict[str, Callable[[Path], None]] = {}
    for name, each in runs.items():
        report = scenario_report(each, summaries[name], bucket)
        files[f"{name}_report.json"] = partial(write_json, value=report)
    for language, name in (("en", "comparison.html"), ("zh", "comparison.zh.html")):
        files[name] = partial(write_text, text=render_page(language, collected, titles, seeds))
    with rc_context(labels.settings):
        for name, figure in draw_all(runs, summaries, bucket, labels).items():
            files[name] = partial(save_figure, figure)
        # Everything is rendered before the first file is written.
        for name, write in files.items():
            write(folder / name)
    return [folder / name for name in files]


def scenario_report(
    runs: Sequence[Run], summaries: Sequence[dict[str, Any]], bucket: float
) -> dict[str, Any]:
    """Return the report on one scenario; each row of `tasks` and `task_outcomes` has its seed."""
    scenario = runs[0].scenario
    return {
        "scenario": scenario.name,
        "seeds": [run.seed for run in runs],
        "settings": as_tables(scenario),
        "cluster": [
            {
                "node": node.name,
                "vendor": node.vendor,
                "cards": [gpu.gpu_type for gpu in node.gpus],
                "capacity": dict(node.resources),
                **node.labels,
            }
            for node in build_nodes(scenario)
        ],
        "tasks": [{"seed": run.seed, **row} for run in runs for row in describe_tasks(run)],
        "task_outcomes": [
            {"seed": run.seed, **describe_outcome(outcome)} for run in runs for outcome in run.outcomes
        ],
        "summary": {**collect(summaries), "runs": list(summaries)},
        "ir_histogram": histogram(
            [value for run in runs for value in values_of(run.outcomes, "interference_ratio")], bucket
        ),
    }


def describe_tasks(run: Run) -> list[dict[str, Any]]:
    """Return the drawn values of each task; its profile is in the settings by name."""
    rows = []
    for task in run.tasks:
        row = as_tables(task)
        row["profile"] = task.profile.name
        row["ideal_duration_s"] = task.profile.ideal_duration_s
        rows.append(row)
    return rows


def describe_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome of a task, with its ratios."""
    return {
        **as_tables(outcome),
        "duration_s": outcome.duration_s,
        "interference_ratio": outcome.interference_ratio,
        "slowdown": outcome.slowdown,
    }
