"""Jumps of the clock of real stores: no lease ends by one, and one machine alone is not believed by all."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from resource_manager import GPUResourceManager, Lease, Refusal
from resource_manager.core.cluster import ClusterState
from resource_manager.core.refusal import RefusalKind
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit import recovery
from resource_manager.storage import Store
from resource_manager.storage.clock import ClockJump, Reading
from resource_manager.storage.outage import outage
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.storage.reports import Sighting
from resource_manager.storage.sql import sqlite
from resource_manager.storage.sql.database import Line
from resource_manager.storage.sql.store import SqlStore
from tests.eventually import wait_for
from tests.redis_server import EMBEDDED, RedisServer
from tests.shifted_clock import ShiftedClock, time_shifted_by
from tests.sql_servers import Postgres

WINDOW_S = 2.0
HOUR_S = 3600


class Moved:
    """A store whose clock a test moves, and its users, each on a machine of its own if it is named."""

    def __init__(self, url: str, jump: Callable[[int], None], stack: ExitStack) -> None:
        self.url = url
        self.jump = jump
        self.stack = stack

    def user(self, machine: str = "") -> GPUResourceManager:
        """Return a manager that has looked at the clock; it tells of its machine as a service does."""
        opened = GPUResourceManager.from_url(
            self.url, inventory=default_inventory(), confirmation_window_s=WINDOW_S, lease_ttl_s=30.0
        )
        manager = self.stack.enter_context(opened)
        if machine:
            manager._commits._recovery.boot_id = machine
            manager._commits._recovery._is_compared = False
            manager._commits._recovery._reported_at = float("-inf")
            manager.expire_and_schedule()
        return manager


@pytest.fixture(params=["redis", "postgresql", "sqlite"])
def moved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moved]:
    if missing := ShiftedClock.missing():
        pytest.skip(missing)
    with ExitStack() as stack:
        clock = ShiftedClock()
        stack.callback(clock.close)
        if request.param == "redis":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redis-")))
            with clock.applied():
                redis = RedisServer(EMBEDDED, folder)
            stack.callback(redis.stop)
            url = redis.url
        elif request.param == "postgresql":
            if missing := Postgres.missing():
                pytest.skip(missing)
            postgresql = Postgres(clock=clock)
            stack.callback(postgresql.stop)
            url = postgresql.url
        else:  # its clock is that of this process
            monkeypatch.setattr(sqlite, "time", time_shifted_by(clock.file))
            url = f"sqlite:///{tmp_path}/state.db"
        yield Moved(url, clock.jump, stack.enter_context(ExitStack()))


def lose(manager: GPUResourceManager, seconds: float) -> None:
    """Have that machine's clock miss some time, as of a paused virtual machine: the store's seems to jump."""
    clock = manager.store.clock
    assert clock is not None
    clock.now()
    clock.reading = clock.reading._replace(at=clock.reading.at - seconds)
    before = clock.steady
    clock.steady = lambda: before() - seconds


@pytest.mark.parametrize("who", ["its holder", "two who waited for it"])
def test_a_jump_back_keeps_the_lock_of_nobody_who_died(moved: Moved, who: str) -> None:
    """By the clock as it is now, what they left would live for an hour, and nobody could commit."""
    holder, other = moved.user().store.lock(), moved.user().store.lock()
    for lock in (holder, other):
        lock._life_s = 0.5  # type: ignore[attr-defined]
    assert holder.acquire(5.0)
    if who != "its holder":
        for token in ("a", "b"):
            other._acquire(token) if isinstance(other, RedisLock) else other._enter(token)  # type: ignore[attr-defined]
    moved.jump(-HOUR_S)
    if who == "its holder":
        holder.let_expire()  # type: ignore[attr-defined]
    else:
        holder.release()
    assert other.acquire(20.0)
    other.release()


def test_a_lease_is_given_back_what_a_jump_took_though_the_first_answer_was_lost(
    moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, worker = moved.user("a"), moved.user()
    lease = worker.allocate("train", 8, server=0, ttl=900.0)
    assert isinstance(lease, Lease)
    moved.jump(HOUR_S)
    suspend = service.store.suspend

    def lost(jump: ClockJump) -> None:
        monkeypatch.setattr(service.store, "suspend", suspend)
        suspend(jump)
        raise outage("no answer")

    monkeypatch.setattr(service.store, "suspend", lost)
    for _ in range(2):
        service.expire_and_schedule()
    assert [change["change"] for change in service.history()][-1:] == ["renewed"]
    assert service.store.suspend == suspend, "the answer was lost"


@pytest.mark.thorough
@pytest.mark.parametrize("ttl_s", [5.0, 900.0], ids=["renewed in the pause", "renewed later"])
def test_no_lease_ends_by_a_jump_forward(
    moved: Moved, ttl_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    service, worker = moved.user("a"), moved.user()
    lease = worker.allocate("train", 8, server=0, ttl=ttl_s)
    assert isinstance(lease, Lease)
    moved.jump(HOUR_S)
    assert {change["change"] for change in service.expire_and_schedule()} <= {"renewed"}
    assert [each["task_id"] for each in service.leases()] == ["train"]
    assert (
        "the store's clock jumped by +3600.0 s: this process grants and expires nothing for 2 s"
        in caplog.text
    )
    assert "grants and expirations pause for all" in caplog.text
    for user in (service, worker, moved.user()):
        refused = user.allocate("next", 2)
        assert isinstance(refused, Refusal)
        assert refused.kind is RefusalKind.RECOVERING
        assert "the store's clock jumped forward by 3600 s, seen" in refused.detail
    assert moved.user().expire_and_schedule() == []
    if ttl_s == 5.0:
        worker.renew("train", fencing_token=lease.fencing_token)
    wait_for(lambda: isinstance(service.allocate("next", 2), Lease))
    assert not [change for change in service.history() if change["change"] in ("expired", "quarantined")]
    assert worker.renew("train", fencing_token=lease.fencing_token)["state"] == "RUNNING"


@pytest.mark.parametrize("machine", ["", "a"], ids=["a client", "a service"])
def test_a_process_that_is_started_after_the_jump_sees_it_by_what_its_machine_marked(
    moved: Moved, machine: str
) -> None:
    dead = moved.user(machine)
    lease = dead.allocate("train", 8, server=0, ttl=5.0)
    assert isinstance(lease, Lease)
    moved.jump(HOUR_S)
    later = moved.user(machine)
    later.expire_and_schedule()
    assert [each["task_id"] for each in later.leases()] == ["train"]
    refused = moved.user("b").allocate("next", 2)
    assert isinstance(refused, Refusal)
    assert "the store's clock jumped forward by 3600 s, seen" in refused.detail
    assert moved.user("b").renew("train", fencing_token=lease.fencing_token)["state"] == "RUNNING"


@pytest.mark.thorough
def test_a_lease_that_nobody_renews_ends_in_its_own_time(moved: Moved) -> None:
    service = moved.user("a")
    assert isinstance(service.allocate("dies", 8, server=0, ttl=WINDOW_S + 1), Lease)
    moved.jump(HOUR_S)
    begin = time.monotonic()
    wait_for(lambda: service.expire_and_schedule() and not service.leases())
    assert time.monotonic() - begin > WINDOW_S


@pytest.mark.thorough
def test_after_a_jump_back_grants_pause_and_leases_end_later(moved: Moved) -> None:
    service, worker = moved.user("a"), moved.user()
    lease = worker.allocate("train", 8, server=0, ttl=5.0)
    assert isinstance(lease, Lease)
    moved.jump(-HOUR_S)
    service.expire_and_schedule()
    refused = moved.user().allocate("next", 2)
    assert isinstance(refused, Refusal)
    assert "clock jumped back by 3600 s" in refused.detail
    assert worker.renew("train", fencing_token=lease.fencing_token)["state"] == "RUNNING"
    wait_for(lambda: isinstance(service.allocate("next", 2), Lease))
    assert service.leases()[0]["task_id"] == "train"


def test_a_machine_that_is_alone_with_a_jump_pauses_alone_until_another_sees_it(moved: Moved) -> None:
    wrong, right = moved.user("a"), moved.user("b")
    assert isinstance(right.allocate("train", 8, server=0, ttl=1.0), Lease)
    lose(wrong, HOUR_S)
    time.sleep(1.1)
    assert wrong.expire_and_schedule() == []
    refused = wrong.allocate("next", 2)
    assert isinstance(refused, Refusal)
    assert refused.kind is RefusalKind.RECOVERING
    assert [change["change"] for change in right.expire_and_schedule()] == ["expired"]
    assert isinstance(right.allocate("other", 2), Lease)
    lose(wrong, HOUR_S)
    lose(right, HOUR_S + 0.5)
    wrong.expire_and_schedule()
    right.expire_and_schedule()
    assert isinstance(moved.user().allocate("third", 2), Refusal), "for all, after a second one"


def test_a_jump_that_only_one_of_two_machines_could_see_counts_once_the_other_is_silent(
    moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "WATCHING_S", 0.1)
    service, _ = moved.user("a"), moved.user("b")
    time.sleep(0.2)
    moved.jump(HOUR_S)
    service.expire_and_schedule()
    assert isinstance(moved.user().allocate("next", 2), Refusal)


def test_a_thread_that_read_the_clock_before_another_learnt_of_the_jump_dates_it_after_it() -> None:
    """Else a second machine would not take it for the same one."""
    now = 1_000.0
    jump = ClockJump(HOUR_S, now + HOUR_S - 10)
    sightings = {"b": Sighting(now)}
    reports = SimpleNamespace(put_sighting=sightings.__setitem__, sightings=lambda: sightings)
    clock = SimpleNamespace(jump=jump, reading=Reading(10.0))
    store = SimpleNamespace(now=lambda: now + HOUR_S, reports=reports, clock=clock)
    seen = recovery.Recovery(cast(Store, store))
    assert seen.note_jump(ClusterState(default_inventory()), now) is jump
    told = sightings[seen.boot_id]
    assert jump.is_known(told.jump_s, told.jumped_at)


def test_the_lock_of_a_dead_holder_does_not_outlive_a_jump_back(moved: Moved) -> None:
    service = moved.user("a")
    lease = service.allocate("train", 8, server=0, ttl=60.0)
    assert isinstance(lease, Lease)
    dead = moved.user().store
    if isinstance(dead, SqlStore):  # as of another process
        dead.database.line = Line()
    assert dead.lock().acquire(1.0)
    moved.jump(-HOUR_S)
    begin = time.monotonic()
    assert service.renew("train", fencing_token=lease.fencing_token)["state"] == "RUNNING"
    assert time.monotonic() - begin < 15.0
