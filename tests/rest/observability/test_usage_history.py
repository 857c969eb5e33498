"""Trends of histories with known times, and the follower that feeds them."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from resource_manager import MemoryStore, Request, Settings
from resource_manager.core.changes import Change, Granted, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement
from resource_manager.errors import StoreUnavailableError
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest import state_follower
from resource_manager.rest.answers import Trend
from resource_manager.rest.observability.metrics import Metrics
from resource_manager.rest.observability.usage_history import UsageHistory
from resource_manager.rest.state_follower import StateFollower
from resource_manager.scheduling.accounting.lives import Lives
from tests.builders import Clock
from tests.eventually import wait_for

START = 1_000_000 * 60.0


def lease(task_id: str, gpus: int, at: float, queued_at: float | None = None, token: int = 1) -> Lease:
    request = Request(task_id, gpus=gpus, resources={"cpus": 1})
    placement = Placement("gpu-server-0", tuple(range(gpus)))
    return Lease(request, (placement,), token, at, at + 1e6, queued_at)


class Walked:
    """Usage of a history on one server of eight GPUs."""

    def __init__(self, *changes: Change) -> None:
        self.usage = UsageHistory()
        self.lives = Lives(ClusterState([Node("s", 0, {}, tuple(map(Gpu, range(8))))]).snapshot())
        for change in changes:
            self.usage.advance(self.lives, change.at)
            life = self.lives.add(change)
            if isinstance(change, Granted) and life is not None:
                self.usage.note_wait(change.at, life.waited_s)

    def series(self, hours: float, now: float) -> Trend:
        return self.usage.series(self.lives, hours, now)


def test_utilisation_is_the_fraction_of_gpu_time_allocated() -> None:
    walked = Walked(Granted(lease("a", 4, START), START), Released("a", 1, START + 90))
    series = walked.series(0.1, START + 180)
    known = [
        (t - START, held)
        for t, held in zip(series["time"], series["allocated"], strict=True)
        if held is not None
    ]
    assert known == [(0, 50.0), (60, 25.0), (120, 0.0)]


def test_time_is_counted_again_once_a_clock_that_was_ahead_is_set_back() -> None:
    """No minute was counted until the time of then had come, and none of the waits was ever dropped."""
    walked = Walked(Granted(lease("a", 4, START), START))
    walked.series(1, START + 365 * 86_400)
    for minute in range(11 * 1440):
        walked.usage.note_wait(START + 60 * minute, 1.0)
        series = walked.series(0.1, START + 60 * minute)
    assert series["allocated"] == [50.0] * 5 + [None]
    assert len(walked.usage.bins) == 7 * 1440 + 1


def test_waits_are_counted_in_the_minute_in_which_they_end() -> None:
    waits = list(enumerate((10.0, 30.0)))
    walked = Walked(
        *(Queued(Request(f"t{i}", gpus=2), START - wait_s, i, START - wait_s) for i, wait_s in waits),
        *(Granted(lease(f"t{i}", 2, START, START - wait_s, i), START) for i, wait_s in waits),
    )
    series = walked.series(0.1, START + 30)
    assert (series["wait"][-1], series["longest"][-1]) == (20.0, 30.0)
    assert series["queue"][-1] == 0.0
    assert max(value for value in series["queue"] if value is not None) > 0


def test_the_wait_of_a_preempted_request_is_without_the_time_that_its_job_ran() -> None:
    request, first = Request("t", gpus=2), START - 600
    walked = Walked(
        Queued(request, first, 0, first),
        Granted(lease("t", 2, first + 10, first, 1), first + 10),
        Released("t", 1, START - 20, "PREEMPTED"),
        Queued(request, first, 0, START - 20),
        Granted(lease("t", 2, START, first, 2), START),
    )
    assert walked.series(0.1, START + 30)["longest"][-1] == 20.0


def test_the_metric_of_waits_is_without_the_time_for_which_a_lease_was_held() -> None:
    clock = Clock()
    clock.now = 0.0
    store = MemoryStore(clock=clock)
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:
        metrics = Metrics(StateFollower(store))
        for server in range(4):
            manager.submit(f"holds {server}", 8, 1)
        manager.submit("t", 8, 1)
        clock.now = 10.0
        manager.release("holds 0")
        clock.now = 60.0
        manager.release("t", outcome="NOT_STARTED")
        assert manager.leases()[-1]["queued_at"] == 0.0
        told = metrics.text().decode().splitlines()
    assert {"gpu_manager_wait_seconds_count 6.0", "gpu_manager_wait_seconds_sum 10.0"} <= set(told)


def test_a_follower_sees_the_changes_of_a_manager_and_its_reset() -> None:
    store = MemoryStore()
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:
        watch = StateFollower(store)
        manager.allocate_resources("a", 8, 1)
        assert watch.read(lambda cluster, now: len(cluster.leases)) == 1
        manager.allocate_resources("b", 8, 1, prefer_server_id=3)
        watch.read(lambda cluster, now: None)
        version = watch.read(lambda cluster, now: cluster.version)
        notice = watch.wait(version - 1, 0.1)
        assert notice is not None
        assert notice.server_ids == frozenset({3})
        assert watch.wait(version, 0.05) is None
        ahead = watch.wait(
            version + 5, 0.05
        )  # as of a page from before the service restarted on an empty store
        assert ahead is not None
        assert (ahead.version, ahead.server_ids) == (version, None)
        manager.reset_resources()
        assert watch.read(lambda cluster, now: len(cluster.leases)) == 0
        assert watch.read(lambda cluster, now: watch.lives.allocated_milli) == 0
        notice = watch.wait(version, 0.1)
        assert notice is not None
        assert notice.server_ids is None
        watch.close()


class OnceBroken(MemoryStore):
    """Store whose next reading fails if `is_broken`."""

    is_broken = False

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        if self.is_broken:
            self.is_broken = False
            raise KeyError("a bug")
        return super().refresh(replica)


def test_a_follower_goes_on_after_an_error_of_any_kind() -> None:
    store = OnceBroken()
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:
        watch = StateFollower(store, interval_s=0.01, outage_s=0.01)
        version = watch.read(lambda cluster, now: cluster.version)
        store.is_broken = True
        assert watch.wait(version, 0.01) is None
        wait_for(lambda: not store.is_broken)
        manager.allocate_resources("a", 8, 1)
        assert watch.wait(version, 30.0) is not None
        watch.close()


def test_points_are_evenly_spaced() -> None:
    series = Walked().series(168, START)
    assert len(series["time"]) <= 361
    assert len({b - a for a, b in pairwise(series["time"])}) == 1


@pytest.mark.parametrize("pages", [0, 1], ids=["none of it", "a page of it"])
def test_changes_whose_history_could_not_be_read_are_told_at_the_next_look(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_follower, "HISTORY_PAGE", 2)
    store = MemoryStore()
    with GPUResourceManager(Settings(store="memory://"), store=store) as manager:
        watch, told = StateFollower(store), list[Change]()
        watch.on_change(lambda change, life: told.append(change))
        before = watch.read(lambda cluster, now: cluster.version)
        for name in ("a", "b", "c"):
            manager.allocate_resources(name, 2, 1)
        calls = count(1)

        def history(after: int, limit: int) -> list[tuple[int, Change]]:
            if next(calls) > pages:
                raise StoreUnavailableError("the store does not answer")
            return MemoryStore.history(store, after, limit)

        with monkeypatch.context() as away:
            away.setattr(store, "history", history)
            with pytest.raises(StoreUnavailableError):
                watch.check()
        watch.check()
        assert [change.lease.lease_id for change in told if isinstance(change, Granted)] == ["a", "b", "c"]
        assert watch.has_changed_leases(before)
        assert watch.read(lambda cluster, now: watch.lives.allocated_milli) == 6000
