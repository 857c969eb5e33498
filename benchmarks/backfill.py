"""How fast backfill decides: the replay of a trace that asks for more than there is, and one live pass.

    python -m benchmarks.backfill

It prints JSON: seconds of processor time for the replay under `fifo` and `priority+backfill`, and
milliseconds of a pass after one release with 10,000 pending requests and 1,000 servers.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from resource_manager.core.changes import Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.replay.replay import Replay
from simulator.replay.workload import Workload, read_workload

JOBS, SERVERS, GPUS, CPUS = 30_000, 100, 8, 64
LOAD, MEAN_RUNTIME_S = 1.2, 900.0
SIZES = (1, 1, 1, 2, 4, 8)
"""GPUs of the jobs, each as likely."""

PENDING, LIVE_SERVERS, RELEASES = 10_000, 1000, 200


def trace(folder: Path, jobs: int = JOBS, servers: int = SERVERS, seed: int = 0) -> Workload:
    """Write a trace of jobs that ask for `LOAD` times what the servers have, and read it."""
    draw = random.Random(seed)
    every_s = MEAN_RUNTIME_S * sum(SIZES) / len(SIZES) / (servers * GPUS) / LOAD
    nodes = ["node,gpus,gpu_type,cpus", *(f"server-{index},{GPUS},A100,{CPUS}" for index in range(servers))]
    rows = ["job,submit_s,runtime_s,gpus,cpus,priority"]
    at = 0.0
    for number in range(jobs):
        at += draw.expovariate(1 / every_s)
        gpus, runtime_s = draw.choice(SIZES), draw.expovariate(1 / MEAN_RUNTIME_S)
        rows.append(f"job-{number},{at:.1f},{runtime_s:.1f},{gpus},{4 * gpus},{draw.randrange(3)}")
    paths = folder / "nodes.csv", folder / "jobs.csv"
    for path, lines in zip(paths, (nodes, rows), strict=True):
        path.write_text("\n".join([*lines, ""]))
    return read_workload(*paths)


def replay_s(workload: Workload, order: str) -> float:
    """Return the processor time of a replay."""
    began = time.process_time()
    Replay(workload, POLICIES["first_fit"], get_order(order)).run()
    return time.process_time() - began


def passes_ms(seed: int = 1) -> list[float]:
    """Return the time of each pass over a long queue, one after each of many releases at random."""
    draw = random.Random(seed)
    gpus = tuple(Gpu(gpu_id, "A100") for gpu_id in range(GPUS))
    cluster = ClusterState(Node(f"s{i}", i, {"cpus": CPUS}, gpus) for i in range(LIVE_SERVERS))
    policy, order = POLICIES["first_fit"], get_order("priority+backfill")
    for number in range(PENDING + LIVE_SERVERS * GPUS):
        size, runtime_s = draw.choice(SIZES), 60.0 + draw.expovariate(1 / MEAN_RUNTIME_S)
        request = Request(
            f"job-{number}",
            size,
            resources={"cpus": 4 * size},
            priority=draw.randrange(3),
            expected_runtime_s=runtime_s,
        )
        changes = (
            [] if cluster.pending else allocator.allocate(cluster, request, SchedulingPass(policy, fifo, 0.0))
        )
        for change in changes or [Queued(request, 0.0, cluster.sequence + 1, 0.0)]:
            cluster.apply(change)
        if len(cluster.pending) == PENDING:
            break
    times = []
    for number in range(RELEASES):
        now = 1.0 + number / 10
        released = lease_steps.release(cluster, draw.choice(list(cluster.leases)), now)
        began = time.perf_counter()
        changes = allocator.with_dispatch(cluster, released, SchedulingPass(policy, order, now))
        times.append(1000 * (time.perf_counter() - began))
        for change in changes:
            cluster.apply(change)
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workload = trace(Path(folder))
    fifo_s, backfill_s = (replay_s(workload, order) for order in ("fifo", "priority+backfill"))
    passes = passes_ms()
    figures = {
        "replay": {
            "fifo_s": round(fifo_s, 2),
            "backfill_s": round(backfill_s, 2),
            "times_fifo": round(backfill_s / fifo_s, 2),
        },
        "pass_after_release_ms": {"p50": round(median(passes), 2), "max": round(max(passes), 2)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
