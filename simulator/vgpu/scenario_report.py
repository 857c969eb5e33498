"""Reports of a sweep: one JSON file per scenario, plots and the comparison page, each written atomically."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from simulator.io.files import write_json, write_text
from simulator.present.figures import drawing, picture, save_png
from simulator.vgpu.metrics import collect, histogram, summarise, values_of
from simulator.vgpu.page import LANGUAGES, Swept, render_page
from simulator.vgpu.plots import Labels, draw_all
from simulator.vgpu.pool import build_nodes
from simulator.vgpu.results import SHORT_DIMENSIONS, SandboxDecision, ScenarioRun, TaskOutcome
from simulator.vgpu.scenario import have_same_load
from simulator.vgpu.tick import LIMITED_BY_MORE_THAN


def write_reports(
    folder: Path, runs: Mapping[str, Sequence[ScenarioRun]], swept: Swept, bucket: float, labels: Labels
) -> list[Path]:
    """Write all reports on the runs (scenario -> one run per seed) into the folder; return the files."""
    summaries = {name: [summarise(run) for run in each] for name, each in runs.items()}
    collected = {name: collect(each) for name, each in summaries.items()}
    scenarios = [each[0].scenario for each in runs.values()]
    titles = {each.name: (each.title, each.title_zh) for each in scenarios}
    same_load = have_same_load(scenarios)
    seeds = [run.seed for run in next(iter(runs.values()))]
    files: dict[str, Callable[[Path], None]] = {}
    for name, each in runs.items():
        report = scenario_report(each, summaries[name], bucket)
        files[f"{name}_report.json"] = partial(write_json, value=report)
    with drawing(labels.fonts):
        figures = draw_all(runs, summaries, swept, bucket, labels)
        pictures = {name: picture(name, figure) for name, figure in figures.items()}
        for language, name in zip(LANGUAGES, ("comparison.html", "comparison.zh.html"), strict=True):
            page = render_page(language, collected, swept, titles, seeds, pictures, same_load)
            files[name] = partial(write_text, text=page)
        for name, figure in figures.items():
            files[f"{name}.png"] = partial(save_png, figure)
        # Everything is rendered before the first file is written.
        for name, write in files.items():
            write(folder / name)
    return [folder / name for name in files]


def scenario_report(
    runs: Sequence[ScenarioRun], summaries: Sequence[dict[str, Any]], bucket: float
) -> dict[str, Any]:
    """Return the report on one scenario; each row of `tasks` and `task_outcomes` has its seed."""
    scenario = runs[0].scenario
    return {
        "scenario": scenario.name,
        "seeds": [run.seed for run in runs],
        "settings": asdict(scenario),
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


def describe_tasks(run: ScenarioRun) -> list[dict[str, Any]]:
    """Return the drawn values of each task; its profile is in the settings by name."""
    return [
        asdict(task) | {"profile": task.profile.name, "ideal_duration_s": task.profile.ideal_duration_s}
        for task in run.tasks
    ]


def describe_outcome(outcome: TaskOutcome) -> dict[str, Any]:
    """Return the outcome of a task, with its ratios."""
    return {
        **asdict(outcome),
        "duration_s": outcome.duration_s,
        "interference_ratio": outcome.interference_ratio,
        "slowdown": outcome.slowdown,
    }


def trace(run: ScenarioRun, decisions: Sequence[SandboxDecision], every: int) -> dict[str, Any]:
    """Return a run as JSON values: what a report has, and a sample of pool and tasks every `every` ticks."""
    delta_t_s = run.scenario.delta_t_s
    by_tick: dict[int, list[SandboxDecision]] = {tick: [] for tick in range(0, run.scenario.ticks, every)}
    for decision in decisions:
        by_tick[decision.tick].append(decision)
    samples = []
    for tick, running in by_tick.items():
        now = tick * delta_t_s
        usage = {node: dict.fromkeys(SHORT_DIMENSIONS, 0.0) for node in run.utilisation}
        for decision in running:
            for name, amount in zip(SHORT_DIMENSIONS, decision.granted, strict=True):
                usage[decision.node][name] += float(amount)
        waiting = [
            each.task_id
            for each in run.outcomes
            if each.arrival_s <= now and (each.start_s is None or each.start_s > now)
        ]
        samples.append(
            {
                "tick": tick,
                "time_s": now,
                "waiting_tasks": waiting,
                "running_tasks": [describe_decision(each) for each in running],
                "node_usage": usage,
            }
        )
    report = scenario_report([run], [summarise(run)], 0.1)
    return {**report, "delta_t_s": delta_t_s, "sample_ticks": every, "samples": samples}


def describe_decision(decision: SandboxDecision) -> dict[str, Any]:
    """Return a decision with its amounts by dimension and the gates that cut the task."""
    amounts = {
        key: dict(zip(SHORT_DIMENSIONS, map(float, getattr(decision, key)), strict=True))
        for key in ("quota", "demand", "allowed", "granted")
    }
    return {
        "task_id": decision.task_id,
        "node": decision.node,
        **amounts,
        "limited": {
            name: amounts["allowed"][name] + LIMITED_BY_MORE_THAN < amounts["demand"][name]
            for name in SHORT_DIMENSIONS
        },
        "tokens": float(decision.tokens),
        "scale": float(decision.scale),
        "progress_tflop": float(decision.progress),
    }
