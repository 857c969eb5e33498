"""Random workloads and a history of a month, for trying replay and comparison without a recording."""

from __future__ import annotations

import math
import random
from pathlib import Path

import click

from resource_manager.cli.base import Command
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.storage.history_file import History, write_file
from simulator.cli import common_options, print_json
from simulator.io.files import write_text
from simulator.progress import progress_bar
from simulator.replay.replay import Replay
from simulator.replay.workload import Job, Workload

HISTORY_NAME = "sample-history.jsonl"
HISTORY_JOBS = 400
HISTORY_START_S = 1_759_276_800
"""Begin of the sample history: 1 October 2025, 00:00 UTC, a Wednesday."""

HOUR_S = 3600
STATED = 0.85
"""Part of the jobs of the sample history whose requests state a runtime."""


def write_sample(folder: Path) -> tuple[Path, Path]:
    """Write four servers of eight GPUs and 200 jobs of three teams; return the two paths."""
    draw = random.Random(0)
    nodes = ["node,gpus,gpu_type,cpus", *(f"server-{index},8,A100,64" for index in range(4))]
    rows = ["job,submit_s,runtime_s,gpus,gpu_milli,cpus,team,priority"]
    at = 0.0
    for number in range(200):
        at += draw.expovariate(1 / 60)
        gpus = draw.choice((1, 1, 1, 2, 4, 8))
        milli = draw.choice((1000, 500, 250)) if gpus == 1 else 1000
        runtime_s = draw.expovariate(1 / 900)
        team, priority = draw.choice("abc"), draw.randrange(3)
        rows.append(f"job-{number},{at:.1f},{runtime_s:.1f},{gpus},{milli},{4 * gpus},{team},{priority}")
    paths = folder / "nodes.csv", folder / "jobs.csv"
    for path, lines in zip(paths, (nodes, rows), strict=True):
        write_text(path, "\n".join([*lines, ""]))
    return paths


def sample_history(seed: int = 0) -> History:
    """Return a month of three teams on three servers of four GPUs, as a manager would have recorded it.

    The manager is the replay under the live defaults. Arrivals follow office
    hours; the runtimes that most jobs state are off by up to a quarter.
    """
    draw = random.Random(seed)
    nodes = [
        Node(f"gpu-server-{index}", index, {"cpus": 64}, tuple(Gpu(gpu, "A100") for gpu in range(4)))
        for index in range(3)
    ]
    jobs = []
    for number, at in enumerate(sorted(_office_time(draw) for _ in range(HISTORY_JOBS))):
        gpus = draw.choices((1, 2, 4), weights=(12, 5, 3))[0]
        runtime_s = round(min(draw.lognormvariate(math.log(5 * HOUR_S), 1.1), 48 * HOUR_S), 1)
        stated_s = round(runtime_s * draw.uniform(0.75, 1.25) / 600 + 1) * 600
        request = Request(
            f"sample/train_{number}",
            gpus,
            resources={"cpus": 8 * gpus},
            team=draw.choices(("vision", "nlp", "speech"), weights=(5, 3, 2))[0],
            priority=draw.choices((1, 5), weights=(4, 1))[0],
            expected_runtime_s=stated_s if draw.random() < STATED else None,
        )
        jobs.append(Job(request, at, runtime_s))
    workload = Workload.of("sample", ClusterState(nodes), jobs)
    record = Replay(workload, first_fit, get_order(ClusterSettings().order)).run()
    return History(workload.start, tuple(record.changes))


def _office_time(draw: random.Random) -> float:
    """Draw a time of the month, in seconds: nine of ten on a weekday, around three in the afternoon."""
    while True:
        day = draw.randrange(30)
        weekend = (day + 2) % 7 >= 5
        if draw.random() < (0.1 if weekend else 0.9):
            hour = min(max(draw.gauss(15, 3.5), 0.0), 23.99)
            return round(HISTORY_START_S + 86400 * day + HOUR_S * hour, 1)


@click.command("sample", cls=Command)
@common_options
def command(seed: int, output_dir: Path | None, as_json: bool) -> None:
    """Write sample-history.jsonl: a month of a small cluster, simulated, for trying `compare --history`."""
    with progress_bar("simulating"):
        history = sample_history(seed)
    path = (output_dir or Path()) / HISTORY_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(history, path)
    if as_json:
        print_json({"path": str(path), "jobs": HISTORY_JOBS, "changes": len(history.changes)})
    else:
        click.echo(f"{path}: {HISTORY_JOBS} jobs of a simulated month, {len(history.changes)} changes")
