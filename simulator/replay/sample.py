"""A small random workload, for trying the replay without a recording."""

from __future__ import annotations

import random
from pathlib import Path

from simulator.io.files import write_text


def write_sample(folder: Path, jobs: int = 200, seed: int = 0) -> tuple[Path, Path]:
    """Write four servers of eight GPUs and the jobs of three teams; return the two paths."""
    draw = random.Random(seed)
    nodes = ["node,gpus,gpu_type,cpus", *(f"server-{index},8,A100,64" for index in range(4))]
    rows = ["job,submit_s,runtime_s,gpus,gpu_milli,cpus,team,priority"]
    at = 0.0
    for number in range(jobs):
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
