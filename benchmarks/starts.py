"""How often a long queue is played forward in the time there is: `python benchmarks/starts.py`.

    python benchmarks/starts.py --json

Requests of one to eight GPUs fill the servers, and wait; each states a runtime, which tasks miss by half.
Announced tasks are of runs of ten, each after the one before it, and the next ones arrive in each play.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import click

from resource_manager.core.changes import Announced, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.forecasts import BACKGROUND_S
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.reasons.announced_arrivals import LagWalk
from resource_manager.scheduling.reasons.lease_ends import DrawnEnds
from resource_manager.scheduling.reasons.runtime_quantiles import RuntimeModel
from resource_manager.scheduling.reasons.start_estimates import forecast_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.cli import print_json


def long_queue(order: str, servers: int, pending: int, announced: int = 0) -> dict[str, Any]:
    """Return the processor time of the plays of a long queue, and how many end in the time that they have."""
    draw = random.Random(0)
    cluster = ClusterState(default_inventory(servers))
    current = SchedulingPass(get_policy("best_fit"), get_order(order), 0.0)
    model = RuntimeModel()
    number = 0
    while len(cluster.pending) < pending:
        number += 1
        gpus, stated_s = draw.choice((1, 1, 1, 2, 2, 4, 8)), draw.lognormvariate(8, 1.5)
        request = Request(f"task{number % 50}_{number}", gpus, expected_runtime_s=stated_s)
        for change in allocator.submit(cluster, request, current):
            cluster.apply(change)
        model.learn(request, stated_s * draw.lognormvariate(0, 0.5))
    requests = [pending.request for pending in cluster.pending.values()]
    current = replace(current, now=600.0)
    drawn = DrawnEnds(cluster, requests, model.estimate, draw.random, current.now)
    lags = announce(cluster, announced, draw)
    began = time.thread_time()
    arrivals = [*lags.arrivals(cluster, current.now, model.estimate, {})]
    arrived = time.thread_time()
    starts = forecast_starts(
        cluster,
        current,
        drawn,
        goes_on=lambda: time.thread_time() < began + BACKGROUND_S,
        arrivals=sorted(arrivals, key=lambda arrival: arrival.at(0.5)),
    )
    return {
        "plays": max(start.plays for start in starts.values()),
        "seconds": time.thread_time() - began,
        "arrivals_ms": 1000 * (arrived - began),
    }


def announce(cluster: ClusterState, count: int, draw: random.Random) -> LagWalk:
    """Announce so many tasks; return what is learnt from as many that were announced before, and asked."""
    walk = LagWalk()
    for number in range(2 * count):
        run, task = f"r{number // 10}", number % 10
        request = Request(f"i:etl/{run}/t{task}", draw.choice((1, 2, 4, 8)), expected_runtime_s=600.0)
        change = Announced(request, 0.0, (f"i:etl/{run}/t{task - 1}",) if task else ())
        walk.add(change)
        if number < count:
            walk.add(Queued(request, draw.lognormvariate(6, 1), number, 0.0))
        else:
            cluster.apply(change)
    return walk


@click.command()
@click.option("--json", "as_json", is_flag=True)
def main(as_json: bool) -> None:
    """Print plays and processor time of long queues and a short one, by the order of the queue."""
    figures = {
        f"{size}_{order.rpartition('+')[2]}": long_queue(order, *numbers)
        for order in ("priority", "priority+backfill")
        for size, *numbers in (("long", 1000, 500), ("announced", 1000, 500, 500), ("short", 30, 50))
    }
    if as_json:
        print_json(figures)
        return
    for name, values in figures.items():
        click.echo(f"{name}: {values}")


if __name__ == "__main__":
    main()
