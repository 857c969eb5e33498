"""GPUs between the jobs of a long queue, seen by the jobs themselves: none idles, but for what was killed."""

import os
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gaps import draw
from tests.e2e.bench import TIMEOUT_FACTOR, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400 * TIMEOUT_FACTOR)]

JOBS = int(os.environ.get("SHORT_JOBS", "500"))
GPUS = 8
GAP_S = 3.0
"""Longest time of a GPU between two jobs while a request waits; for a quiet machine of two cores."""

KILL_S = 60.0
"""Time after a kill in which it may explain a gap: Airflow takes over from a dead triggerer after 30 s."""


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
    for part, component in ((0.2, "triggerer"), (0.5, "scheduler"), (0.8, "triggerer")):
        wait_for(lambda part=part: len(run.processes()) >= part * JOBS, 3600, f"{part:.0%} of the jobs", 1.0)
        kills.append(time.time())
        bench.kill(component)
        bench.start(component)
    run.wait_until("success", 3600)
    spans = spans_of(run.beats())
    draw(spans, kills, Path(os.environ.get("IDLE_GAPS_PICTURE", bench.home / "idle-gaps.png")))
    gaps = [(after[0] - before[1], before[1]) for jobs in spans.values() for before, after in pairwise(jobs)]
    assert len(gaps) == JOBS - GPUS
    unexplained = sorted(
        gap_s for gap_s, at in gaps if not any(kill - GAP_S < at < kill + KILL_S for kill in kills)
    )
    record_property("gaps_s", unexplained)
    print(f"{len(unexplained)} gaps without a kill: median {unexplained[len(unexplained) // 2]:.1f} s,")
    print(f"longest {unexplained[-1]:.1f} s; {len(gaps) - len(unexplained)} with one: {max(gaps)[0]:.1f} s")
    assert max(unexplained) <= GAP_S * TIMEOUT_FACTOR
    assert all(gap_s < KILL_S * TIMEOUT_FACTOR for gap_s, _ in gaps)
    check_worker_runs(Path(f"{bench.ledger}-worker-runs").read_text().splitlines(), run.run_id)


def spans_of(beats):
    """Return first and last beat of each job by its GPU, in the order of time."""
    jobs = {}
    for beat in beats:
        job = jobs.setdefault(beat["process"], [beat["at"], beat["at"], beat["gpus"]])
        job[1] = beat["at"]
    spans = defaultdict(list)
    for begins, ends, gpu in jobs.values():
        spans[gpu].append((begins, ends))
    return {gpu: sorted(jobs) for gpu, jobs in sorted(spans.items())}


def check_worker_runs(lines, run_id):
    """Assert that a worker ran twice for each task that needed one try: it asked, and it collected."""
    runs, tries = defaultdict(list), defaultdict(int)
    for own, task, number, method in map(str.split, lines):
        if own == run_id:
            runs[task].append(method)
            tries[task] = max(tries[task], int(number))
    assert len(runs) == JOBS
    counted = Counter(tuple(methods) for task, methods in runs.items() if tries[task] == 1)
    assert set(counted) == {("execute", "execute_ended")}
    assert counted.total() > 0.9 * JOBS
