"""Speed of policies on the openb trace, on one core: pods per second, the best of several runs.

    python benchmarks/replay.py --data ../shared/data/openb

Figures are pods per second of processor time, which other work on the machine affects less than wall time.
`first_fit over 4 servers` is the baseline of the same run: allocations and releases per second through the
allocator.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import click

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.allocator import allocate
from resource_manager.scheduling.lease_steps import release
from resource_manager.scheduling.placement.policies.cpu_gpu_scores import CPU_MILLI
from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.cli import InputErrors, print_json
from simulator.replay import openb
from simulator.replay.compiled_placement import POLICIES, CompiledPolicy

PUBLISHED_PODS_PER_S = 18
"""Rate of the published simulator: about ten minutes for one run."""


def pods_per_s(trace: openb.Trace, policy: str, seed: int) -> float:
    """Return pods placed or refused per second of processor time, commits included, with empty caches."""
    chosen = CompiledPolicy(
        trace.nodes, trace.arrivals, policy, Fragmentation.of(trace.pods, CPU_MILLI.cpu_name), seed
    )
    gc.collect()
    began = time.process_time()
    openb.place(trace, chosen)
    return len(trace.arrivals) / (time.process_time() - began)


def first_fit_per_s(rounds: int = 10_000) -> float:
    """Return allocations plus releases per second on four servers of eight GPUs."""
    cluster = ClusterState(default_inventory(4, 8, 64))
    requests = [Request(f"t{number}", 2, 1000, {"cpus": 4}) for number in range(rounds)]
    began = time.process_time()
    for request in requests:
        cluster.apply(allocate(cluster, request, SchedulingPass(first_fit, fifo, 0.0))[0])
        cluster.apply(release(cluster, request.lease_id, 0.0)[0])
    return 2 * rounds / (time.process_time() - began)


@click.command(cls=InputErrors)
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder of openb.")
@click.option("--pods", default="default", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=42, show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Runs per policy; the best one counts.",
)
@click.option("--json", "as_json", is_flag=True)
def main(data: Path, pods: str, seed: int, rounds: int, as_json: bool) -> None:
    """Print pods per second for every published policy."""
    trace = openb.read_trace(data, pods, seed)
    best: dict[str, float] = {}
    for _ in range(rounds):
        for policy in POLICIES:
            best[policy] = max(best.get(policy, 0.0), pods_per_s(trace, policy, seed))
        best["first_fit over 4 servers"] = max(best.get("first_fit over 4 servers", 0.0), first_fit_per_s())
    if as_json:
        print_json({name: round(value) for name, value in best.items()})
        return
    click.echo(f"pods per second of processor time, commits included, the best of {rounds} runs")
    for name, value in best.items():
        faster = (
            f"  {value / PUBLISHED_PODS_PER_S:8,.0f} times the published simulator"
            if name in POLICIES
            else ""
        )
        click.echo(f"{name:<26}{value:>10,.0f}/s{faster}")


if __name__ == "__main__":
    main()
