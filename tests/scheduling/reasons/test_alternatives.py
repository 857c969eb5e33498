"""Alternatives: what would start sooner than a request that waits, each by one play of the queue."""

from __future__ import annotations

from resource_manager.core.changes import Queued, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.reasons.alternatives import alternatives
from resource_manager.scheduling.scheduling_pass import SchedulingPass

NOW = SchedulingPass(first_fit, get_order("fifo"), 10.0)


def busy(*requests: Request) -> ClusterState:
    """Return a server of 4 A100 and one of 4 H100, with these leases since 10 s."""
    kinds = ("A100", "H100")
    cluster = ClusterState(
        Node(kind, number, {"cpus": 64}, tuple(Gpu(gpu, kind) for gpu in range(4)))
        for number, kind in enumerate(kinds)
    )
    for request in requests:
        for change in allocator.submit(cluster, request, NOW):
            cluster.apply(change)
    return cluster


def found(cluster: ClusterState, request: Request, current: SchedulingPass = NOW) -> dict[str, float]:
    return {each.change: each.at for each in alternatives(cluster, current, request)}


def a100(name: str, gpus: int, runtime_s: float = 1000.0) -> Request:
    return Request(name, gpus, gpu_types=("A100",), expected_runtime_s=runtime_s)


def test_fewer_gpus_or_another_type_may_start_at_once() -> None:
    cluster = busy(a100("runs", 2))
    before = cluster.snapshot()
    assert found(cluster, a100("w", 4)) == {"2 GPUs instead of 4": 10.0, "GPUs of any type": 10.0}
    assert cluster.snapshot() == before


def test_what_would_start_no_sooner_or_never_is_not_named() -> None:
    full = busy(a100("runs", 4), Request("also", 4, expected_runtime_s=2000.0))
    assert found(full, a100("w", 4)) == {}
    assert found(busy(), a100("w", 4)) == {}, "it starts at once itself"


def test_a_pending_request_is_changed_at_its_place_in_the_queue() -> None:
    cluster = busy(a100("runs", 2))
    for sequence, name in enumerate(("w", "behind"), start=5):
        cluster.apply(Queued(a100(name, 4), 10.0, sequence, 10.0))
    assert found(cluster, a100("w", 4))["2 GPUs instead of 4"] == 10.0
    assert "2 GPUs instead of 4" not in found(cluster, a100("new", 4)), "it waits behind them"


def test_a_shorter_runtime_is_backfilled() -> None:
    cluster = busy(a100("runs", 2, 1000.0))
    cluster.apply(Queued(a100("head", 4), 10.0, 5, 10.0))
    backfill = SchedulingPass(first_fit, get_order("fifo+backfill"), 10.0)
    assert found(cluster, a100("w", 2, 1600.0), backfill)["an expected runtime of 800 s"] == 10.0


def test_another_team_has_what_this_one_may_not_hold() -> None:
    cluster = busy()
    cluster.apply(TeamsChanged(Teams((Team("small", limit=1), Team("large"))), 0.0))
    assert found(cluster, Request("w", 2, team="small"))["team large"] == 10.0
    bounded = Teams((Team("small", limit=1), Team("large", max_priority=0)))
    cluster.apply(TeamsChanged(bounded, 0.0))
    assert "team large" not in found(cluster, Request("w", 2, team="small", priority=1)), (
        "it is refused there"
    )


def test_what_the_caller_may_not_ask_for_is_not_named() -> None:
    cluster = busy(a100("runs", 2))

    def named(request: Request, *teams: str) -> list[str]:
        return [each.change for each in alternatives(cluster, NOW, request, least_gpus=3, teams=teams)]

    assert named(a100("w", 4)) == ["GPUs of any type"]
    cluster.apply(TeamsChanged(Teams((Team("small", limit=1), Team("large"), Team("other"))), 0.0))
    assert named(Request("w", 4, team="small")) == ["team large", "team other"]
    assert named(Request("w", 4, team="small"), "small", "other") == ["team other"]
