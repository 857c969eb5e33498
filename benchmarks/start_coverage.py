"""How many estimated starts came true, on public traces: `python benchmarks/start_coverage.py --data DATA`.

    python benchmarks/start_coverage.py --data ../shared/data --order priority+backfill --trace pollux

Jobs are submitted to a manager whose clock goes from event to event, and end well once their runtime is
over. Nothing is known when a trace begins. What counts is the first estimate of each request that waited.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.estimates import pollux_jobs, shockwave_jobs, show
from resource_manager.core.changes import Granted, Outcome
from resource_manager.core.cluster import ClusterState
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.forecasts import BACKGROUND_S, EstimateOutcome, Forecasts, kept_record
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.settings import Settings
from resource_manager.storage.memory import MemoryStore
from simulator.cli import InputErrors
from simulator.replay.workload import Job, split
from simulator.rounds.leases import uniform_nodes

TRACES = {"pollux": (pollux_jobs, 40, 4), "shockwave": (shockwave_jobs, 40, 1)}
"""Traces with servers and GPUs of each, so many that some jobs wait, and the queue comes to an end."""

TTL_S = 3e8
MAX_CHANGES = 10_000


class Clock:
    now = 0.0


def outcomes(
    jobs: Sequence[Job], servers: int, gpus: int, order: str, limit_s: float
) -> list[EstimateOutcome]:
    """Return the first estimate of each job that waited, with its start, in the order of the starts."""
    clock, policy = Clock(), get_policy("first_fit")
    store = MemoryStore(clock=lambda: clock.now)
    forecasts = Forecasts(store, lambda cluster, now: SchedulingPass(policy, get_order(order), now))
    nodes = [replace(node, resources={"cpus": gpus}) for node in uniform_nodes(servers, gpus)]
    jobs = sorted(split(jobs, ClusterState(nodes)), key=lambda job: job.submitted_at)
    runtimes = {job.request.lease_id: job.runtime_s for job in jobs}
    ends: list[tuple[float, str]] = []
    seen = 0
    cluster = {"policy": "first_fit", "order": order}
    with GPUResourceManager(
        Settings.of({"store": "memory://"}), store=store, inventory=nodes, cluster=cluster
    ) as manager:

        def note_grants() -> None:
            nonlocal seen
            for version, change in store.history(seen, MAX_CHANGES):
                seen = version
                if isinstance(change, Granted):
                    lease = change.lease
                    heapq.heappush(ends, (lease.granted_at + runtimes[lease.lease_id], lease.lease_id))

        def go_to(at: float) -> None:
            while ends and ends[0][0] <= at:
                clock.now, lease_id = heapq.heappop(ends)
                manager.release(lease_id, outcome=Outcome.SUCCESS)
                note_grants()

        for job in jobs:
            go_to(job.submitted_at)
            clock.now, request = job.submitted_at, job.request
            manager.submit(
                request.lease_id, request.gpus, 1, nodes=request.nodes, labels=dict(request.labels), ttl=TTL_S
            )
            note_grants()
            with Replica(store) as replica:
                forecasts.update(replica.refresh(), clock.now, limit_s)
        go_to(math.inf)
        with Replica(store) as replica:
            forecasts.update(replica.refresh(), clock.now, limit_s)
    return kept_record(store).outcomes


def score(found: Sequence[EstimateOutcome]) -> dict[str, Any]:
    """Return the part inside in percent, and the median width in parts of the estimated wait."""
    known = [each for each in found if each.given.median is not None]
    half = len(known) // 2
    widths = [
        (each.given.latest - each.given.earliest) / max(each.given.median - each.given.at, 1.0)
        for each in known[half:]
        if each.given.median is not None and each.given.latest is not None and each.given.earliest is not None
    ]
    return {
        "starts": len(found),
        "unknown_percent": 100 * (1 - len(known) / len(found)),
        "first_half_percent": _percent(known[:half]),
        "second_half_percent": _percent(known[half:]),
        "of_wait_width": statistics.median(widths),
    }


def _percent(found: Sequence[EstimateOutcome]) -> float:
    return 100 * sum(each.is_inside for each in found) / len(found)


@click.command(cls=InputErrors)
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder of the traces.")
@click.option("--order", default="priority", show_default=True)
@click.option("--seconds", default=BACKGROUND_S, show_default=True, help="Processor time of each estimate.")
@click.option("--trace", "names", type=click.Choice(list(TRACES)), multiple=True, default=list(TRACES))
@click.option("--json", "as_json", is_flag=True)
def main(data: Path, order: str, seconds: float, names: Sequence[str], as_json: bool) -> None:
    """Print the figures of each trace."""
    figures = {}
    for name in names:
        read, servers, gpus = TRACES[name]
        figures[name] = score(outcomes(read(data / name), servers, gpus, order, seconds))
    show(figures, as_json)


if __name__ == "__main__":
    main()
