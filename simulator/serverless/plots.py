"""Report of an episode: Gantt chart of the NUMA nodes, utilisation and load over time, makespans, rent."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from simulator.io.files import write_text
from simulator.present.figures import (
    WIDTH,
    Bar,
    draw_gantt,
    draw_lines,
    drawing,
    new_figure,
    picture,
    save_png,
    show_shares,
)
from simulator.present.page import Page, Section, render
from simulator.present.palette import light
from simulator.present.tables import Column, Table
from simulator.present.units import duration, share, time_unit
from simulator.serverless.cluster import Location, node_name
from simulator.serverless.raw_env import RawEnv
from simulator.serverless.run import Episode

TIME_POINTS = 400
TITLES = {
    "gantt": "Containers on NUMA nodes, coloured by workflow",
    "utilization": "Cores and memory in use",
    "load": "Threads for each core",
    "makespans": "Makespans of workflows",
    "rent": "Rent so far",
}


def write_plots(env: RawEnv, episode: Episode, folder: Path) -> None:
    """Write a PNG file for each of `TITLES`, and `report.html` with all of them."""
    times = np.linspace(0.0, episode.summary.last_completion_s, TIME_POINTS)
    cores, memory, threads = _use(env, times)
    with drawing():
        figures = {
            "gantt": _gantt(env, episode),
            "utilization": _over_time(times, {"cores": cores, "memory": memory}, "in use", shares=True),
            "load": _over_time(times, {"": threads}, "threads per core"),
            "makespans": _makespans(episode),
            "rent": _rent(episode),
        }
        pictures = [picture(TITLES[name], figure, wide=name == "gantt") for name, figure in figures.items()]
        html = render(_page(episode, float(cores.mean()), float(memory.mean()), pictures))
        for name, figure in figures.items():
            save_png(figure, folder / f"{name}.png")
    write_text(folder / "report.html", html)


def _page(episode: Episode, cores: float, memory: float, pictures: Any) -> Page:
    summary, records = episode.summary, episode.records
    running = sum(record.completion_time - record.start_time for record in records)
    prepared = sum(record.creation_time - record.submission_time for record in records)
    queued = sum(record.start_time - record.creation_time for record in records)
    total = max(running + prepared + queued, 1e-9)
    verdict = [
        f"{summary.workflows:,} workflows of {summary.functions:,} functions end after"
        f" {duration(summary.last_completion_s)} for {summary.rent:,.2f} $ of rent; a workflow takes"
        f" {duration(summary.mean_makespan_s)} on average.",
        f"Of a function's time {share(running / total)} is running, {share(prepared / total)} cold start and"
        f" transfer of data, {share(queued / total)} waiting for memory.",
        f"On average {share(cores)} of the cores and {share(memory)} of the memory are in use.",
    ]
    times = sorted(episode.makespans_s)
    columns = [Column("makespans", "text"), *(Column(name, "time") for name in ("least", "mean", "most"))]
    table = Table(columns, [["all workflows", times[0], summary.mean_makespan_s, times[-1]]])
    sections = [Section("Workflows", tables=[table]), Section("Over time", pictures=pictures)]
    return Page("Serverless workflows on NUMA servers", verdict, sections)


def _gantt(env: RawEnv, episode: Episode) -> Any:
    figure, axes = new_figure(width=2 * WIDTH)
    bars = [
        Bar(
            node_name(Location(record.server_name, record.server_id, record.numa_node_id)),
            record.start_time,
            record.completion_time,
            record.wf_id,
        )
        for record in episode.records
    ]
    draw_gantt(axes, bars, [node.name for node in env.cluster.nodes])
    return figure


def _use(env: RawEnv, times: Any) -> Any:
    """Return the share of cores and of memory in use, and the threads per core, at these times."""
    nodes = env.cluster.nodes
    cores = np.array([node.cpu for node in nodes], dtype=float)
    memory = np.array([node.memory for node in nodes], dtype=float)
    values = np.zeros((3, len(times)))
    for node, share_of_cores, share_of_memory in zip(
        nodes, cores / cores.sum(), memory / memory.sum(), strict=True
    ):
        records = node.utilization.records
        at = np.searchsorted([record.timestamp for record in records], times, side="right") - 1
        values[0] += share_of_cores * np.array([record.cpu for record in records])[at]
        values[1] += share_of_memory * np.array([record.memory for record in records])[at]
        values[2] += share_of_cores * np.array([record.load for record in records])[at]
    return values


def _over_time(times: Any, values: Mapping[str, Any], label: str, *, shares: bool = False) -> Any:
    figure, axes = new_figure()
    unit = time_unit(times[-1])
    across = unit.scaled(times)
    draw_lines(axes, {name: [(across, list(up))] for name, up in values.items()})
    axes.set_ylim(bottom=0)
    if shares:
        show_shares(axes.yaxis)
    axes.set_xlabel(f"time, {unit.name}")
    axes.set_ylabel(label)
    return figure


def _makespans(episode: Episode) -> Any:
    figure, axes = new_figure()
    unit = time_unit(max(episode.makespans_s))
    makespans = unit.scaled(episode.makespans_s)
    axes.hist(makespans, bins=min(30, max(5, len(makespans))), color=light("series-1"))
    mean = episode.summary.mean_makespan_s / unit.seconds
    axes.axvline(mean, color=light("limit"), linestyle="--", label="mean")
    axes.set_xlabel(f"makespan, {unit.name}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("workflows")
    axes.legend()
    return figure


def _rent(episode: Episode) -> Any:
    figure, axes = new_figure()
    unit = time_unit(episode.summary.last_completion_s)
    times = [0.0, *(record.submission_time for record in episode.records), episode.summary.last_completion_s]
    totals = list(accumulate((record.rent for record in episode.records), initial=0.0))
    axes.step(unit.scaled(times), [*totals, totals[-1]], where="post", color=light("series-1"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"time of the decision, {unit.name}")
    axes.set_ylabel("rent so far, $")
    return figure
