"""Plots of an episode: Gantt of NUMA nodes, utilisation and load over time, makespans, rent."""

from __future__ import annotations

from pathlib import Path

from simulator.report import plain, pyplot, save_figure
from simulator.serverless.cluster import Location
from simulator.serverless.raw_env import RawEnv
from simulator.serverless.run import Episode, FunctionRecord

TIME_POINTS = 400
ROW_HEIGHT = 0.86


def write_plots(env: RawEnv, episode: Episode, folder: Path) -> list[Path]:
    """Write `gantt.png`, `utilization.png`, `makespans.png` and `rent.png`; return their paths."""
    written = []
    for name, draw in (
        ("gantt", _gantt),
        ("utilization", _utilization),
        ("makespans", _makespans),
        ("rent", _rent),
    ):
        path = folder / f"{name}.png"
        save_figure(draw(env, episode), path)
        written.append(path)
    return written


def _gantt(env: RawEnv, episode: Episode) -> object:
    """Draw one row per NUMA node; containers that overlap in time get lanes of their own."""
    from matplotlib.collections import PolyCollection

    rows = {location: row for row, location in enumerate(env.cluster.locations)}
    by_row: dict[int, list[FunctionRecord]] = {}
    for record in episode.records:
        location = Location(record.server_name, record.server_id, record.numa_node_id)
        by_row.setdefault(rows[location], []).append(record)
    bars, workflows = [], []
    for row, records in by_row.items():
        lanes = _lanes(records)
        height = ROW_HEIGHT / (max(lanes) + 1)
        for record, lane in zip(records, lanes, strict=True):
            top = row - ROW_HEIGHT / 2 + lane * height
            left, right = record.start_time, record.completion_time
            bars.append([(left, top), (right, top), (right, top + height), (left, top + height)])
            workflows.append(record.wf_id)
    figure, axes = pyplot().subplots(figsize=(9, min(12.0, max(2.5, 0.35 * len(rows)))))
    boxes = PolyCollection(bars, cmap="tab20", linewidths=0.1, edgecolors="white")
    boxes.set_array(workflows)
    axes.add_collection(boxes)
    axes.autoscale()
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = [plain(f"{name}/{server}/{node}") for name, server, node in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.set_xlabel("time (s)")
    axes.set_title("containers by NUMA node, coloured by workflow")
    return figure


def _lanes(records: list[FunctionRecord]) -> list[int]:
    """Return for each record the lowest lane that is free from its start to its end."""
    free_at: list[float] = []
    lane_of: dict[tuple[int, int], int] = {}
    for record in sorted(records, key=lambda record: record.start_time):
        lane = next((lane for lane, time in enumerate(free_at) if time <= record.start_time), len(free_at))
        free_at[lane : lane + 1] = [record.completion_time]
        lane_of[record.wf_id, record.fn_id] = lane
    return [lane_of[record.wf_id, record.fn_id] for record in records]


def _utilization(env: RawEnv, episode: Episode) -> object:
    import numpy as np

    times = np.linspace(0.0, episode.summary.last_completion_s, TIME_POINTS)
    nodes = env.cluster.nodes
    cores = np.array([node.cpu for node in nodes], dtype=float)
    memory = np.array([node.memory for node in nodes], dtype=float)
    values = np.zeros((3, TIME_POINTS))
    for node, share, mib in zip(nodes, cores / cores.sum(), memory / memory.sum(), strict=True):
        records = node.utilization.records
        at = np.searchsorted([record.timestamp for record in records], times, side="right") - 1
        values[0] += share * np.array([record.cpu for record in records])[at]
        values[1] += mib * np.array([record.memory for record in records])[at]
        values[2] += share * np.array([record.load for record in records])[at]
    figure, (upper, lower) = pyplot().subplots(2, 1, figsize=(9, 5), sharex=True)
    upper.plot(times, 100 * values[0], label="cores")
    upper.plot(times, 100 * values[1], label="memory")
    upper.set_ylabel("in use (%)")
    upper.set_ylim(0, 105)
    upper.legend()
    lower.plot(times, values[2], color="tab:red")
    lower.set_ylabel("threads per core")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("time (s)")
    upper.set_title("utilisation and load of the cluster")
    return figure


def _makespans(env: RawEnv, episode: Episode) -> object:
    figure, axes = pyplot().subplots(figsize=(6, 3.5))
    axes.hist(episode.makespans_s, bins=min(30, max(5, len(episode.makespans_s))))
    axes.axvline(episode.summary.mean_makespan_s, color="black", linestyle="--", label="mean")
    axes.set_xlabel("makespan (s)")
    axes.set_ylabel("workflows")
    axes.legend()
    axes.set_title("makespans of workflows")
    return figure


def _rent(env: RawEnv, episode: Episode) -> object:
    figure, axes = pyplot().subplots(figsize=(6, 3.5))
    times, totals, total = [0.0], [0.0], 0.0
    for record in episode.records:
        total += record.rent
        times.append(record.submission_time)
        totals.append(total)
    times.append(episode.summary.last_completion_s)
    totals.append(total)
    axes.step(times, totals, where="post")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of the decision (s)")
    axes.set_ylabel("rent so far ($)")
    axes.set_title("rent")
    return figure
