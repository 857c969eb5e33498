"""Gantt charts of a scored plan, one per tier."""

from __future__ import annotations

import heapq
from collections import defaultdict
from pathlib import Path
from typing import Any

from simulator.edge.dataset import Dataset, Kind
from simulator.edge.scorer import Run, Score
from simulator.report import plain, save_figure

TIER_NAMES: dict[Kind, str] = {"Cloud": "host", "BS": "bs", "UE": "ue"}
TITLES: dict[Kind, str] = {"Cloud": "Cloud hosts", "BS": "Base stations", "UE": "User devices"}


def save_gantt_charts(dataset: Dataset, score: Score, folder: Path) -> list[Path]:
    """Write `gantt-host.png`, `gantt-bs.png` and `gantt-ue.png` for the tiers that ran tasks."""
    by_kind: dict[Kind, list[Run]] = defaultdict(list)
    for run in score.runs:
        by_kind[run.device.kind].append(run)
    written = []
    for kind, name in TIER_NAMES.items():
        if by_kind[kind]:
            path = folder / f"gantt-{name}.png"
            save_figure(_gantt(dataset, by_kind[kind], f"{TITLES[kind]}, dataset {dataset.name}"), path)
            written.append(path)
    return written


def lanes(runs: list[Run]) -> list[int]:
    """Assign runs to as few lanes as possible, so that runs of one lane do not overlap."""
    order = sorted(range(len(runs)), key=lambda i: (runs[i].matched_s, runs[i].end_s))
    free: list[tuple[int, int]] = []
    chosen = [0] * len(runs)
    count = 0
    for i in order:
        if free and free[0][0] <= runs[i].matched_s:
            _, lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        chosen[i] = lane
        heapq.heappush(free, (runs[i].end_s, lane))
    return chosen


def _gantt(dataset: Dataset, runs: list[Run], title: str) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    by_device: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_device[run.device.index].append(run)
    job_place = {job_id: i for i, job_id in enumerate(dataset.jobs)}
    colours = colormaps["turbo"]
    rows, begins, ends, shades, ticks, labels = [], [], [], [], [], []
    base = 0
    for _, members in sorted(by_device.items()):
        chosen = lanes(members)
        for run, lane in zip(members, chosen, strict=True):
            rows.append(base + lane)
            begins.append(run.matched_s)
            ends.append(run.end_s)
            place = job_place[dataset.tasks[run.task_id].job_id]
            shades.append(colours((place + 0.5) / len(job_place)) if run.completed else (0.8, 0.8, 0.8, 1.0))
        ticks.append(base + max(chosen) / 2)
        labels.append(members[0].device.name)
        base += max(chosen) + 2
    figure = Figure(figsize=(12, min(14, 1.5 + 0.12 * base)))
    axes = figure.add_subplot()
    axes.hlines(rows, begins, ends, colors=shades, linewidth=max(0.6, min(6, 500 / base)))
    if len(ticks) <= 30:
        axes.set_yticks(ticks, labels)
    else:
        axes.set_ylabel(f"{len(ticks)} devices, one row per running executor")
        axes.set_yticks([])
    axes.set_xlabel("second")
    axes.set_title(f"{plain(title)}: one colour per job, grey for runs not completed")
    axes.margins(x=0.01)
    axes.set_ylim(base - 0.5, -1)
    return figure
