"""The Muri traces (Zhao et al., SIGCOMM 2022): preemptive shortest-first scheduling, replanned at events.

Every event replans all jobs from an empty cluster, and ends within a relative 1e-9 are one event: the ends
are computed anew each time, so an event queue would hold nothing but ends that no longer apply.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.scheduling.allocator import allocate
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.errors import InputError
from simulator.io.rows import Row, read_csv
from simulator.progress import Progress, no_progress
from simulator.rounds.leases import uniform_nodes

SERVERS = 8
GPUS_PER_SERVER = 8
COLUMNS = ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "iteration_time")
PROFILED_SLOWDOWN = 1.015
SAME_EVENT = 1e-9
"""Ends of jobs within this relative distance are one event."""

GPU_COUNTS = (1, 2, 4, 8, 16, 32)
OVERHEAD_S = {
    "vgg16": (7, 7, 8, 9, 9, 10),
    "vgg19": (7, 7, 8, 9, 10, 10),
    "resnet18": (4, 5, 5, 7, 7, 7),
    "shufflenet_v2_x1_0": (4, 4, 5, 5, 7, 8),
    "bert": (10,) * 6,
    "gpt2": (10,) * 6,
    "a2c": (38, 39, 39, 46, 46, 46),
    "dqn": (5, 5, 6, 6, 8, 8),
}
"""Seconds that a running job loses at each event, by model, for each of `GPU_COUNTS`.

vgg16 on 32 GPUs takes 10 s: with 9 s, five of the eight published runs are not reproduced.
"""


@dataclass(slots=True)
class Job:
    """A training job and its progress."""

    parts: tuple[Request, ...]
    gpus: int
    submitted_at: float
    iteration_s: float
    overhead_s: float
    iterations_left: float
    checked_at: float = 0.0
    running: bool = False
    ended_at: float = 0.0

    @property
    def remaining_s(self) -> float:
        return self.iterations_left * self.iteration_s

    def charge(self, now: float) -> None:
        """Count the iterations done since the last event; each event costs the overhead."""
        if self.running:
            self.iterations_left -= max(now - self.checked_at - self.overhead_s, 0) / self.iteration_s
        self.checked_at = now


Key = Callable[[Job], float]

ORDERS: dict[str, Key] = {
    "srtf": lambda job: job.remaining_s,
    "srsf": lambda job: job.remaining_s * job.gpus,
}
"""Shortest remaining time first, and shortest remaining service (time x GPUs) first."""


def read_jobs(folder: Path, name: str) -> list[Job]:
    """Return the jobs of a trace by submission time; raise `InputError` with file, line and reason."""
    path = folder / f"{name}.csv"
    ids: set[str] = set()
    jobs = [_job(row, ids) for row in read_csv(path, COLUMNS)]
    if not jobs:
        raise InputError("the trace lists no job", path=path)
    return sorted(jobs, key=lambda job: job.submitted_at)


def _job(row: Row, ids: set[str]) -> Job:
    """Return the job of a row, whose id is to be none of `ids`, and add it to them."""
    name, model, gpus = row.text("job_id"), row.text("model_name"), row.whole("num_gpu")
    if not name or name in ids:
        raise row.fail(f"job_id {name!r} is empty or used twice")
    ids.add(name)
    if model not in OVERHEAD_S:
        raise row.fail(f"unknown model {model!r}; known are {', '.join(OVERHEAD_S)}")
    if gpus not in GPU_COUNTS:
        raise row.fail(f"num_gpu is {gpus}, not one of {', '.join(map(str, GPU_COUNTS))}")
    iterations, iteration_ms = row.whole("iterations"), row.number("iteration_time")
    if not iterations or not iteration_ms:
        raise row.fail("iterations and iteration_time must be above 0")
    share = min(gpus, GPUS_PER_SERVER)
    return Job(
        tuple(Request(f"{name}/{part}", share) for part in range(gpus // share)),
        gpus,
        row.number("submit_time") / 1000,
        iteration_ms * PROFILED_SLOWDOWN / 1000,
        OVERHEAD_S[model][GPU_COUNTS.index(gpus)],
        iterations,
    )


def run(jobs: list[Job], order: Key, progress: Progress = no_progress) -> None:
    """Run the jobs to their ends and set `ended_at` of each."""
    cluster = ClusterState(uniform_nodes(SERVERS, GPUS_PER_SERVER))
    arriving = list(reversed(jobs))
    active: list[Job] = []
    ends: list[tuple[float, list[Job]]] = []
    ended = 0
    while arriving or active:
        starts_at = arriving[-1].submitted_at if arriving else float("inf")
        ends_at = ends[0][0] if ends else float("inf")
        now = min(starts_at, ends_at)
        if ends_at == now:
            for job in ends[0][1]:
                job.ended_at = now
                job.running = False
                active.remove(job)
                ended += 1
        while arriving and arriving[-1].submitted_at == now:
            active.append(arriving.pop())
        for job in active:
            job.charge(now)
        active.sort(key=order)  # stable: jobs of equal key keep the order of the last event
        _replan(cluster, active)
        ends = _ends(active, now)
        progress(ended, len(jobs))


def _replan(cluster: ClusterState, active: list[Job]) -> None:
    """Decide which jobs run, from an empty cluster: first fit in order, skipping what does not fit."""
    idle = SERVERS * GPUS_PER_SERVER
    with cluster.trial():
        for job in active:
            job.running = job.gpus <= idle
            if not job.running:
                continue
            idle -= job.gpus
            for part in job.parts:
                # Sizes are powers of two, so first fit leaves fewer than eight idle GPUs on partly used
                # servers: what fits by total count fits by server, and a large job finds whole servers.
                [granted] = allocate(cluster, part, SchedulingPass(first_fit, fifo, 0.0))
                cluster.apply(granted)


def _ends(active: list[Job], now: float) -> list[tuple[float, list[Job]]]:
    """Return the ends of the running jobs if no other event happened, the earliest first."""
    ends: list[tuple[float, list[Job]]] = []
    for job in active:
        if job.running:
            at = now + job.remaining_s
            for known_at, jobs in ends:
                if isclose(known_at, at, rel_tol=SAME_EVENT):
                    jobs.append(job)
                    break
            else:
                ends.append((at, [job]))
    ends.sort(key=lambda end: end[0])
    return ends


def replay(jobs: list[Job], order: str, progress: Progress = no_progress) -> dict[str, Any]:
    """Return the summary of one order over the jobs; completion time counts from a job's submission."""
    started = time.perf_counter()
    run(jobs, ORDERS[order], progress)
    completion_s = sorted(job.ended_at - job.submitted_at for job in jobs)
    return {
        "jobs": len(jobs),
        "mean_jct_s": sum(completion_s) / len(jobs),
        "makespan_s": max(job.ended_at for job in jobs) - jobs[0].submitted_at,
        "p99_jct_s": completion_s[int(0.99 * len(jobs))],
        "wall_s": round(time.perf_counter() - started, 3),
    }
