"""Trends and estimates from a history whose every moment is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from resource_manager import MemoryStore, Request, Settings
from resource_manager.api.trends import Trends, task_key
from resource_manager.api.watch import Watch
from resource_manager.cluster import ClusterState
from resource_manager.estimates import Confidence, Runtime, estimate_starts
from resource_manager.inventory import default_inventory
from resource_manager.manager import GPUResourceManager
from resource_manager.models import Granted, Lease, Placement, Queued, Released
from resource_manager.policies import get_policy
from resource_manager.queueing import get_order

START = 1_000_000 * 60.0


def lease(task_id: str, gpus: int, at: float, queued_at: float | None = None, token: int = 1) -> Lease:
    request = Request(task_id, gpus=gpus, resources={"cpus": 1})
    placement = Placement("gpu-server-0", tuple(range(gpus)))
    return Lease(request, placement, token, at, at + 1e6, queued_at)


def test_utilisation_is_the_share_of_time_held() -> None:
    trends = Trends(capacity_milli=8000)
    trends.add(Granted(lease("a", 4, START), START))
    trends.add(Released("a", 1, START + 90))
    series = trends.series(0.1, START + 180)
    known = [
        (t - START, held) for t, held in zip(series["time"], series["held"], strict=True) if held is not None
    ]
    assert known == [(0, 50.0), (60, 25.0), (120, 0.0)]


def test_waits_are_counted_where_they_end() -> None:
    trends = Trends(capacity_milli=8000)
    for i, wait_s in enumerate((10.0, 30.0)):
        trends.add(Queued(Request(f"t{i}", gpus=2), START - wait_s))
    for i, wait_s in enumerate((10.0, 30.0)):
        trends.add(Granted(lease(f"t{i}", 2, START, START - wait_s, i), START))
    series = trends.series(0.1, START + 30)
    assert (series["wait"][-1], series["longest"][-1]) == (20.0, 30.0)
    assert series["queue"][-1] == 0.0
    assert max(value for value in series["queue"] if value is not None) > 0


def test_runtimes_of_the_same_task_are_remembered() -> None:
    trends = Trends(capacity_milli=8000)
    for i, runtime_s in enumerate((100.0, 300.0, 200.0)):
        trends.add(Granted(lease(f"train_{i}", 2, START), START))
        trends.add(Released(f"train_{i}", 1, START + runtime_s))
        confidence = Confidence.GOOD if i == 2 else Confidence.FAIR
        known = trends.runtime_of(Request("train_77", gpus=2))
        assert known is not None
        assert known.confidence is confidence
    assert trends.runtime_of(Request("train_9", gpus=2)) == Runtime(200.0, Confidence.GOOD)
    assert trends.runtime_of(Request("other", gpus=2)) is None
    assert trends.runtime_of(Request("o", expected_runtime_s=5.0)) == Runtime(5.0, Confidence.GOOD)
    labels = {"dag_id": "d", "task_id": "t", "run_id": "r"}
    assert task_key(Request("x", labels=labels)) == "d/t"


@pytest.mark.parametrize("ttl_s", [50.0, float("inf")])
def test_an_estimate_leaves_the_state_as_it_was(ttl_s: float) -> None:
    cluster = ClusterState(default_inventory(1))
    policy, order = get_policy("first_fit"), get_order("fifo")
    request = Request("a", gpus=8, ttl_s=ttl_s)
    cluster.apply(Granted(Lease(request, Placement("gpu-server-0", tuple(range(8))), 1, 0.0, ttl_s), 0.0))
    for i in range(3):
        cluster.apply(Queued(Request(f"w{i}", gpus=8, ttl_s=100.0), 1.0))
    before, deadlines = cluster.snapshot(), len(cluster._deadlines)
    starts = estimate_starts(cluster, policy, order, 10.0, lambda request: None)
    after = cluster.snapshot()
    assert replace(after, waiting=()) == replace(before, waiting=())
    assert sorted(after.waiting, key=lambda entry: entry.sequence) == list(before.waiting)
    assert len(cluster._deadlines) == deadlines
    if ttl_s == 50.0:
        assert [starts[f"w{i}"].at for i in range(3)] == [50.0, 150.0, 250.0]
        assert starts["w0"].confidence is Confidence.POOR
    else:
        assert starts["w0"].at is None


def test_a_watch_follows_what_others_do_and_survives_a_reset() -> None:
    store = MemoryStore()
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:
        watch = Watch(store)
        manager.allocate_resources("a", 8, 1)
        assert watch.look(lambda cluster, now: len(cluster.leases)) == 1
        manager.allocate_resources("b", 8, 1, prefer_server_id=3)
        watch.look(lambda cluster, now: None)
        version = watch.look(lambda cluster, now: cluster.version)
        news = watch.wait(version - 1, 0.1)
        assert news is not None
        assert news.server_ids == {3}
        assert watch.wait(version, 0.05) is None
        ahead = watch.wait(version + 5, 0.05)  # a page of a service that was restarted on an empty store
        assert ahead is not None
        assert (ahead.version, ahead.server_ids) == (version, None)
        manager.reset_resources()
        assert watch.look(lambda cluster, now: len(cluster.leases)) == 0
        assert watch.trends._held == 0
        news = watch.wait(version, 0.1)
        assert news is not None
        assert news.server_ids is None
        watch.close()


def test_points_are_evenly_spaced() -> None:
    series = Trends(8000).series(168, START)
    assert len(series["time"]) <= 361
    assert len({b - a for a, b in pairwise(series["time"])}) == 1
