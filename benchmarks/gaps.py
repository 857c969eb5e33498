"""How long GPUs idle between the jobs of a long queue while the process that runs the triggers is killed.

It is what a triggerer does, without Airflow itself: 500 tasks of a second ask a service for one of 8 GPUs
each, and a process runs all of their triggers. It is killed (SIGKILL) and started again after a fifth, a half
and four fifths of the jobs; what triggers store in Airflow is in files, and outlives it. `--picture` draws
when each GPU had a job. With `--airflow` it is tests/e2e/test_idle_gaps.py: a real Airflow on PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import waiting

JOB_S = 1.0
KILLED_AT = (0.2, 0.5, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--picture", type=Path, help="draw into this file")
    parser.add_argument("--airflow", action="store_true", help="run the tasks in a real Airflow")
    parser.add_argument("--triggerer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.triggerer is not None:
        asyncio.run(run_triggers(options.triggerer))
        return
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Airflow and the tasks log
    if options.airflow:
        drawn = {"IDLE_GAPS_PICTURE": str(options.picture.resolve())} if options.picture else {}
        figures = waiting.on_postgresql("test_idle_gaps.py", SHORT_JOBS=str(options.tasks), **drawn)
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            figures = measured(Path(folder), options.tasks, options.picture)
    with results:
        print(json.dumps(figures), file=results)


def measured(folder: Path, tasks: int, picture: Path | None) -> dict[str, Any]:
    """Run all tasks; return the gaps of GPUs in seconds, those that a kill explains apart."""
    for name in ("begun", "over", "fired", "kept"):
        (folder / name).mkdir()
    with waiting.service_for_user(folder, waiting.GPUS) as (url, token, _):
        waiting.connect(folder, url, token)
        triggers = [waiting.ask(folder, number, command_of(folder, number)) for number in range(tasks)]
        (folder / "triggers.json").write_text(json.dumps([each.serialize() for each in triggers]))
        command = [sys.executable, __file__, "--triggerer", str(folder)]
        process, kills = subprocess.Popen(command), []
        for part in (*KILLED_AT, None):
            name, wanted = ("fired", tasks) if part is None else ("begun", part * tasks)
            while len(list((folder / name).iterdir())) < wanted:
                if process.poll() is not None and part is not None:
                    sys.exit("the process that runs the triggers has ended")
                time.sleep(0.1)
            if part is not None:
                process.kill()
                kills.append(time.time())
                process.wait()
                process = subprocess.Popen(command)
        process.wait()
    spans = spans_of(folder)
    if picture is not None:
        draw(spans, kills, picture)
    others, by_kill = gaps_of(spans, kills)
    runs = [len(path.read_text().split()) for path in (folder / "begun").iterdir()]
    return {
        "jobs": len(runs),
        "most_runs_of_a_job": max(runs) // 2,
        "gap_p50_s": round(median(others), 2),
        "gap_max_s": round(max(others), 2),
        "gap_after_a_kill_max_s": round(max(by_kill), 2),
    }


def command_of(folder: Path, number: int) -> str:
    """Return a job that writes down its GPU and when it began, and when it was over."""
    quoted = shlex.quote(str(folder))
    return (
        f"echo $GPU_LEASE_GPUS $(date +%s.%N) >> {quoted}/begun/{number}; sleep {JOB_S}; "
        f"date +%s.%N > {quoted}/over/{number}"
    )


async def run_triggers(folder: Path) -> None:
    """Run the triggers of all tasks that have not fired, as a triggerer does, and note what they fire."""
    waiting.keep_in(folder / "kept")
    from resource_manager.airflow.task_trigger.trigger import TaskTrigger

    async def fire(number: int, arguments: dict[str, Any]) -> None:
        trigger = TaskTrigger(**arguments)
        event = await anext(trigger.run())
        await trigger.cleanup()
        assert event.payload["exit_code"] == 0, event.payload
        (folder / "fired" / str(number)).touch()

    given = json.loads((folder / "triggers.json").read_text())
    fired = {path.name for path in (folder / "fired").iterdir()}
    left = [(number, arguments) for number, (_, arguments) in enumerate(given) if str(number) not in fired]
    await asyncio.gather(*(fire(number, arguments) for number, arguments in left))


def spans_of(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return when jobs began and were over, by GPU and in this order."""
    spans = defaultdict(list)
    for path in (folder / "begun").iterdir():
        gpu, begun = path.read_text().split()[-2:]
        spans[gpu].append((float(begun), float((folder / "over" / path.name).read_text())))
    return {gpu: sorted(jobs) for gpu, jobs in sorted(spans.items())}


def gaps_of(
    spans: dict[str, list[tuple[float, float]]], kills: list[float]
) -> tuple[list[float], list[float]]:
    """Return the gaps in seconds that no kill explains, and those that one does."""
    ends = [(kill, recovered_at(spans, kill)) for kill in kills]
    others: list[float] = []
    by_kill: list[float] = []
    for jobs in spans.values():
        for (_, over), (begun, _) in pairwise(jobs):
            is_of_kill = any(begun > kill and over < recovered for kill, recovered in ends)
            (by_kill if is_of_kill else others).append(begun - over)
    return others, by_kill


def recovered_at(spans: dict[str, list[tuple[float, float]]], kill: float) -> float:
    """Return when each GPU had begun a job after the kill: until then it may explain a gap."""
    return max(min((begun for begun, _ in jobs if begun > kill), default=kill) for jobs in spans.values())


def draw(spans: dict[str, list[tuple[float, float]]], kills: list[float], path: Path) -> None:
    """Draw when each GPU had a job, with a line for each kill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3))
    axes = figure.subplots()
    start = min(jobs[0][0] for jobs in spans.values())
    for row, jobs in enumerate(spans.values()):
        bars = [(begun - start, over - begun) for begun, over in jobs]
        axes.broken_barh(bars, (row - 0.4, 0.8), edgecolor="white", linewidth=0.3)
    for kill in kills:
        axes.axvline(kill - start, color="black")
    axes.set_yticks(range(len(spans)), [f"GPU {gpu}" for gpu in spans])
    axes.set_xlabel("seconds since the first job; a line is a kill")
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    main()
