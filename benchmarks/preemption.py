"""How fast victims are chosen among 10,000 leases, and what 1,000 teams cost a grant: processor time as JSON.

The leases hold 1, 2, 4 or 8 GPUs of servers with 8; a hundred teams hold a quarter more than their guarantee.
Passes over a queue of requests in vain are those after each release and submission on 200 full servers, each
with a job that nobody may take.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from resource_manager.core.changes import Change, Granted, Queued, Released, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.preemption.victims import find_victims
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass

LEASES, TEAMS, GPUS, SAMPLES = 10_000, 100, 8, 25
SIZES = (1, 1, 1, 1, 2, 2, 4, 8)


def cluster() -> ClusterState:
    """Return servers filled with leases of teams beyond their guarantee, and one team that holds nothing."""
    rng = random.Random(1)
    sizes = [rng.choice(SIZES) for _ in range(LEASES)]
    gpus = tuple(Gpu(gpu_id, "H100") for gpu_id in range(GPUS))
    servers = sum(sizes) // GPUS + 200
    state = ClusterState(Node(f"s{i:05}", i, {"cpus": 128}, gpus) for i in range(servers))
    rules = [Team(f"team {i}", int(0.8 * sum(sizes) / TEAMS)) for i in range(TEAMS)]
    state.apply(TeamsChanged(Teams((*rules, Team("owed", 2000)), True, 0.0, 0.0), 0.0))
    for number, size in enumerate(sizes):
        team, priority = f"team {rng.randrange(TEAMS)}", rng.randrange(3)
        request = Request(f"lease {number}", size, resources={"cpus": 1}, team=team, priority=priority)
        place = first_fit(state, request)
        assert place is not None
        lease = Lease(request, (place,), state.last_fencing_token + 1, float(rng.randrange(100_000)))
        state.apply(Granted(lease, lease.granted_at))
    rest = Request("rest", 1)
    while place := first_fit(state, rest):  # nothing is free
        filler = rest.for_task(f"rest {state.last_fencing_token}")
        state.apply(Granted(Lease(filler, (place,), state.last_fencing_token + 1, 2e5), 0.0))
    return state


def choices(state: ClusterState, gpus: int) -> dict[str, float]:
    """Return the milliseconds to choose the victims for a request of so many GPUs of one server."""
    order = get_order("priority")
    pending = PendingRequest(Request("new", gpus, resources={"cpus": 1}, team="owed"), 0.0, 1)
    found: list[Lease] = []

    def one() -> None:
        nonlocal found
        found = find_victims(state, pending, SchedulingPass(first_fit, order, 1e6))

    times = [_ms(one) for _ in range(SAMPLES)]
    assert found
    return {"p50": round(median(times), 2), "max": round(max(times), 2), "victims": len(found)}


def passes(requests: int, gangs: int) -> dict[str, float]:
    """Return the milliseconds of a pass over so many requests in vain, each of another kind."""
    state = ClusterState(
        Node(f"s{i:03}", i, {"cpus": 128}, tuple(Gpu(gpu_id) for gpu_id in range(GPUS)), f"s{i}")
        for i in range(200)
    )
    rules = (Team("owed", 400), *(Team(f"team {i}", 100) for i in range(8)))
    state.apply(TeamsChanged(Teams(rules, True, 0.0, 0.0), 0.0))
    for number in range(200 * GPUS):
        gpu_id = number % GPUS
        request = Request(f"l{number}", 1, team=f"team {number // GPUS % 8}", preemptible=gpu_id > 0)
        place = Placement(f"s{number // GPUS:03}", (gpu_id,))
        state.apply(Granted(Lease(request, (place,), number + 1, float(number)), 0.0))
    order, now = get_order("priority"), 1e5
    for number in range(requests + gangs):
        nodes = 1 if number < requests else 4
        request = Request(f"vain {number}", GPUS, team="owed", priority=number, nodes=nodes)
        state.apply(Queued(request, now, state.sequence + 1, now))
    times = []
    for number in range(SAMPLES):
        ended = state.leases[f"l{GPUS * number + 3}"]
        released = Released(ended.lease_id, ended.fencing_token, now + number)
        asked = Request(f"new {number}", GPUS, team="team 1")
        for changes in ([released], allocator.enqueue(state, [asked], now + number)):

            def one(changes: Sequence[Change] = changes, at: float = now + number) -> None:
                for change in allocator.with_dispatch(state, changes, SchedulingPass(first_fit, order, at)):
                    state.apply(change)

            times.append(_ms(one))
    return {"p50": round(median(times[2:]), 2), "max": round(max(times[2:]), 2), "first": round(times[0], 2)}


def grants(teams: int) -> dict[str, float]:
    """Return the microseconds of a grant and its release with so many idle teams."""
    state = ClusterState(
        Node(f"s{i}", i, {"cpus": 128}, tuple(Gpu(gpu_id) for gpu_id in range(GPUS))) for i in range(100)
    )
    if teams:
        rules = tuple(Team(f"team {i}", 0, limit=8) for i in range(teams))
        state.apply(TeamsChanged(Teams(rules, True), 0.0))

    def one(number: int) -> None:
        [granted] = allocator.allocate(
            state, Request(f"t{number}", 1, team="team 1"), SchedulingPass(first_fit, fifo, 1.0)
        )
        state.apply(granted)
        state.apply(Released(f"t{number}", state.last_fencing_token, 2.0))

    times = [1000 * _ms(lambda number=number: one(number)) for number in range(2000)]  # type: ignore[misc]
    return {"p50_us": round(median(times), 1)}


def _ms(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return 1000 * (time.process_time() - begin)


def main() -> None:
    state = cluster()
    figures: dict[str, object] = {"leases": len(state.leases)}
    figures |= {f"victims_{gpus}_gpus": choices(state, gpus) for gpus in (1, 2, 4, 8)}
    figures |= {
        f"in_vain_{requests}_and_{gangs}_gangs": passes(requests, gangs)
        for requests, gangs in ((0, 0), (32, 0), (32, 4), (500, 8))
    }
    figures |= {f"grant_{teams}_teams": grants(teams) for teams in (0, 1, 1000)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
