"""GPUs between the jobs of a long queue, seen by the jobs themselves: none idles, but for what was killed."""

import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gaps import KILLED_AT, draw, gaps_of
from tests.e2e.bench import wait_for
from tests.eventually import TIMEOUT_FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]

JOBS = int(os.environ.get("SHORT_JOBS", "500"))
GPUS = 8
GAP_S = 3.0
"""Longest time of a GPU between two jobs while a request waits; for a quiet machine of two cores."""

RECOVERY_S = 60.0
"""Longest time of a GPU without a job after a kill: Airflow takes over from a dead triggerer after 30 s."""

KILLED = ("triggerer", "scheduler", "triggerer")
"""The scheduler is killed with its workers, one of which collects the end of a job."""


def test_gpus_do_not_idle_between_five_hundred_short_jobs(bench, record_property):
    wait_for(
        lambda: bench.manager.allocate_resources("holder", GPUS, 8, gpu_types=["local"], ttl=3600),
        what="a lease on all GPUs",
    )
    run = bench.run("short_jobs")
    run.map_indexes = range(JOBS)
    wait_for(lambda: run.count("deferred") == JOBS, 3 * JOBS, f"{JOBS} tasks deferred")
    bench.manager.release("holder")
    kills = []
    for part, component in zip(KILLED_AT, KILLED, strict=True):
        wait_for(lambda part=part: len(run.processes()) >= part * JOBS, 3600, f"{part:.0%} of the jobs", 1.0)
        if component == "scheduler":
            wait_for(lambda: run.count("running"), what="a worker that collects a job's end", every_s=0.05)
        kills.append(time.time())
        bench.kill(component)
        bench.start(component)
    run.wait_until("success", 3600)
    spans = spans_of(run.beats())
    draw(spans, kills, Path(os.environ.get("IDLE_GAPS_PICTURE", bench.home / "idle-gaps.png")))
    gaps, by_kill = gaps_of(spans, kills)
    assert len(gaps) + len(by_kill) == JOBS - GPUS
    record_property("jobs", sum(map(len, spans.values())))
    record_property("gaps_s", gaps)
    record_property("gaps_of_a_kill_s", by_kill)
    print("gaps without a kill:", *(f"{gap:.1f}" for gap in sorted(gaps)[-20:]))
    print("gaps with one:", *(f"{gap:.1f}" for gap in sorted(by_kill)))
    assert max(gaps) <= GAP_S * TIMEOUT_FACTOR
    assert max(by_kill) < RECOVERY_S * TIMEOUT_FACTOR
    check_worker_runs(Path(f"{bench.ledger}-worker-runs").read_text().splitlines(), run.run_id)


def spans_of(beats):
    """Return first and last beat of each job by its GPU, in the order of time."""
    jobs: dict[str, Any] = {}
    for beat in beats:
        job = jobs.setdefault(beat["process"], [beat["at"], beat["at"], beat["gpus"]])
        job[1] = beat["at"]
    spans = defaultdict(list)
    for begins, ends, gpu in jobs.values():
        spans[gpu].append((begins, ends))
    return {gpu: sorted(jobs) for gpu, jobs in sorted(spans.items())}


def check_worker_runs(lines, run_id):
    """Assert that a worker ran twice for each task that needed one try: it asked, and it collected."""
    runs: dict[str, list[Any]] = defaultdict(list)
    tries: dict[str, int] = defaultdict(int)
    for own, task, number, method in map(str.split, lines):
        if own == run_id:
            runs[task].append(method)
            tries[task] = max(tries[task], int(number))
    assert len(runs) == JOBS
    counted = Counter(tuple(methods) for task, methods in runs.items() if tries[task] == 1)
    assert set(counted) == {("execute", "execute_ended")}
    assert counted.total() > 0.9 * JOBS
