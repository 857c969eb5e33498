"""How fast gangs are granted: one of 64 servers among 10,000, and one pass over 1,000 pending gangs.

It prints milliseconds as JSON. Half of the servers have leases on some of their GPUs; a rack has 64 servers.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from statistics import median

from resource_manager.core.changes import Granted, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass

SERVERS, RACK, GPUS = 10_000, 64, 8
MEMBERS = 64
PENDING = 1000
SAMPLES = 50


def cluster(servers: int = SERVERS) -> ClusterState:
    """Return a cluster in which every second server has a lease that runs for up to ten hours."""
    rng = random.Random(1)
    gpus = tuple(Gpu(gpu_id, "H100") for gpu_id in range(GPUS))
    state = ClusterState(
        Node(f"s{i:05}", i, {"cpus": 64}, gpus, f"10.0.{i >> 8}.{i & 255}", labels={"rack": f"r{i // RACK}"})
        for i in range(servers)
    )
    for i in range(0, servers, 2):
        runtime_s = float(rng.randrange(600, 36_000))
        request = Request(
            f"busy {i}",
            rng.randint(1, GPUS),
            resources={"cpus": 8},
            required_node=f"s{i:05}",
            expected_runtime_s=runtime_s,
        )
        for change in allocator.allocate(state, request, SchedulingPass(POLICIES["first_fit"], fifo, 0.0)):
            state.apply(change)
    return state


def gang(number: int, nodes: int = MEMBERS, gpus: int = GPUS, **more: object) -> Request:
    return Request(f"gang {number}", gpus, resources={"cpus": 8}, nodes=nodes, **more)  # type: ignore[arg-type]


def grants(state: ClusterState, policy: str, **more: object) -> dict[str, float]:
    """Return the milliseconds to decide and apply a grant; each gang is released again."""

    def one(number: int) -> None:
        [granted] = allocator.allocate(
            state, gang(number, gpus=4, **more), SchedulingPass(POLICIES[policy], fifo, 1.0)
        )
        assert isinstance(granted, Granted)
        state.apply(granted)

    times = []
    for number in range(SAMPLES):
        times.append(_ms(lambda number=number: one(number)))  # type: ignore[misc]
        [released] = lease_steps.release(state, f"gang {number}", 2.0)
        state.apply(released)
    return {"p50": round(median(times), 2), "max": round(max(times), 2)}


def passes(state: ClusterState, order: str) -> dict[str, float]:
    """Return the milliseconds of a pass over pending gangs, none of which starts, of many sizes."""
    rng = random.Random(2)
    servers = len(state.nodes)
    for number in range(PENDING):
        # More servers with all GPUs free than there are: each of them waits.
        nodes = servers * 11 // 20 + rng.randrange(servers // 4)
        request = gang(number, nodes, GPUS, expected_runtime_s=float(rng.randrange(600, 36_000)))
        state.apply(Queued(request, 0.0, number + 1, 0.0))
    discipline = get_order(order)

    def one() -> None:
        assert allocator.schedule_pending(state, SchedulingPass(POLICIES["first_fit"], discipline, 1.0)) == []

    times = [_ms(one) for _ in range(SAMPLES // 5)]
    return {"p50": round(median(times), 2), "max": round(max(times), 2)}


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    state = cluster()
    figures: dict[str, object] = {
        f"grant_{policy}": grants(state, policy) for policy in ("first_fit", "best_fit", "fgd")
    }
    figures["grant_same_rack"] = grants(state, "first_fit", nodes=32, same="rack")
    figures["pass_priority"] = passes(cluster(), "priority")
    figures["pass_priority_backfill"] = passes(cluster(), "priority+backfill")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
