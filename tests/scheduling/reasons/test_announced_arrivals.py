"""When announced demands should be made: after the tasks before them, by the lags learnt."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from resource_manager.core.changes import Announced, Granted, Queued, Released, Withdrawn
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.runtimes import RAN
from resource_manager.scheduling.reasons.announced_arrivals import LagWalk, Times
from resource_manager.scheduling.reasons.runtime_quantiles import RuntimeQuantiles
from tests.builders import nodes


def request(task: str) -> Request:
    return Request(task, 1, labels={"instance": "i", "dag_id": "d", "task_id": task})


def hour(_: Request) -> RuntimeQuantiles:
    """Return the runtime of any task: an hour, of which nothing varies."""
    return RuntimeQuantiles((8.188689,) * 21)


def learnt(*lags_s: float, task: str = "b", after: tuple[str, ...] = ()) -> LagWalk:
    """Return a walk over runs in which the task asked that long after it was announced."""
    walk, at = LagWalk(), 0.0
    for number, lag_s in enumerate(lags_s):
        walk.add(Announced(request(task), at, after))
        walk.add(Queued(request(task), at + lag_s, number, at + lag_s))
        at += 10_000.0
    return walk


def times(walk: LagWalk, cluster: ClusterState, now: float = 0.0, **starts: Times) -> dict[str, Times | None]:
    return {each.announced.lease_id: each.times for each in walk.arrivals(cluster, now, hour, starts)}


def test_the_lag_counts_from_the_announcement_or_the_last_end_before_it() -> None:
    cluster = ClusterState(nodes("a"))
    walk = learnt(*[60.0] * 5)
    cluster.apply(Announced(request("b"), 1000.0))
    assert times(walk, cluster, 1000.0)["b"] == pytest.approx((1060.0,) * 3, rel=0.01)
    running = Lease(request("a"), (Placement("a", (0,)),), 1, 1000.0)
    cluster.apply(Granted(running, 1000.0))
    cluster.apply(Announced(request("b"), 1000.0, ("a",)))
    assert times(walk, cluster, 1000.0)["b"] == pytest.approx((4660.0,) * 3, rel=0.01)


def test_what_a_task_before_it_ran_until_it_was_preempted_counts() -> None:
    cluster, before = ClusterState(nodes("a")), request("a")
    ran = replace(before, labels={**before.labels, RAN: "3000"})
    cluster.apply(Granted(Lease(ran, (Placement("a", (0,)),), 1, 1000.0), 1000.0))
    cluster.apply(Announced(request("b"), 1000.0, ("a",)))
    assert times(learnt(*[60.0] * 5), cluster, 1000.0)["b"] == pytest.approx((1660.0,) * 3, rel=0.01)
    waits = ClusterState(nodes("a"))
    waits.apply(Queued(ran, 1000.0, 1, 1000.0), Announced(request("b"), 1000.0, ("a",)))
    found = times(learnt(*[60.0] * 5), waits, 1000.0, a=(1000.0, 1100.0, 1200.0))["b"]
    assert found == pytest.approx((1660.0, 1760.0, 1860.0), rel=0.01)


def test_the_start_of_a_pending_task_before_it_counts_and_an_unknown_one_leaves_it_unknown() -> None:
    cluster = ClusterState(nodes("a"))
    walk = learnt(*[60.0] * 5)
    cluster.apply(Queued(request("a"), 0.0, 1, 0.0))
    cluster.apply(Announced(request("b"), 0.0, ("a",)))
    assert times(walk, cluster)["b"] is None
    assert times(walk, cluster, a=(100.0, 200.0, 300.0))["b"] == pytest.approx((3760, 3860, 3960), rel=0.01)


def test_an_unknown_start_of_a_task_before_it_is_told_from_a_run_that_is_missing() -> None:
    cluster, walk = ClusterState(nodes("a")), LagWalk()
    cluster.apply(Queued(request("a"), 0.0, 1, 0.0))
    for name, before in (("b", "a"), ("c", "b"), ("other", "none")):
        cluster.apply(Announced(request(name), 0.0, (before,)))
    found = {each.announced.lease_id: each for each in walk.arrivals(cluster, 0.0, hour, {})}
    assert {name: (each.unknown, each.waits) for name, each in found.items()} == {
        "b": ("a", True),
        "c": ("a", True),
        "other": ("other", False),
    }


def test_a_withdrawn_demand_teaches_nothing() -> None:
    walk = LagWalk()
    for number in range(5):
        walk.add(Announced(request("b"), 0.0))
        walk.add(Withdrawn("b", 50.0))
        walk.add(Queued(request("b"), 1000.0, number, 1000.0))
    cluster = ClusterState(nodes("a"))
    cluster.apply(Announced(request("b"), 0.0))
    assert times(walk, cluster) == {"b": None}


def test_the_end_of_a_task_before_it_is_where_the_lag_begins() -> None:
    walk = LagWalk()
    for number in range(5):
        walk.add(Announced(request("b"), 0.0, ("a",)))
        walk.add(Released("a/3", number, 900.0))
        walk.add(Queued(request("b"), 960.0, number, 960.0))
    cluster = ClusterState(nodes("a"))
    cluster.apply(Announced(request("b"), 0.0))
    assert times(walk, cluster)["b"] == pytest.approx((60.0,) * 3, rel=0.01)


def test_four_of_five_requests_come_within_their_interval() -> None:
    rng = random.Random(7)
    walk, cluster, at, inside = LagWalk(), ClusterState(nodes("a")), 0.0, 0
    for number in range(260):
        walk.add(change := Announced(request("b"), at))
        cluster.apply(change)
        first, _, last = times(walk, cluster, at)["b"] or (0.0, 0.0, 0.0)
        asks_at = at + rng.lognormvariate(5.0, 0.6)
        inside += number >= 60 and first <= asks_at <= last
        walk.add(Queued(request("b"), asks_at, number, asks_at))
        at += 10_000.0
    assert 0.73 <= inside / 200 <= 0.87
