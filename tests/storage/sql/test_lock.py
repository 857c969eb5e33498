"""How the lock of a database goes on: with a commit, among the threads of a process, past those who left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from secrets import token_hex
from typing import Any

import pytest

from resource_manager.errors import LockError
from resource_manager.storage import open_store
from resource_manager.storage.locks import TimedLock
from resource_manager.storage.sql import dialect
from resource_manager.storage.sql.database import Line
from resource_manager.storage.sql.lock import MAX_PASSES
from resource_manager.storage.sql.store import SqlStore
from tests.builders import Clock
from tests.eventually import wait_for
from tests.storage.walk import granted, started


class Clients:
    """Stores of one namespace, each lock of which is taken by a thread of its own."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.stack = stack
        self.taken: list[str] = []
        self.threads: dict[threading.Thread, TimedLock] = {}

    def open(self, line: Line | None = None) -> SqlStore:
        """Return a store; with a `line` of its own it is as in another process."""
        store = self.stack.enter_context(closing(open_store(self.url)))
        assert isinstance(store, SqlStore)
        if line is not None:
            store.database.line = line
        return store

    def take(self, store: SqlStore, timeout_s: float = 5.0) -> TimedLock:
        """Return a held lock, which is renewed no longer than the test takes."""
        lock = lock_of(store)
        assert lock.acquire(timeout_s)
        self.stack.callback(release, lock)
        return lock

    def wait(self, store: SqlStore, name: str, timeout_s: float = 60.0) -> TimedLock:
        """Return a lock once it waits; its thread notes by `name` that it took it."""
        lock = lock_of(store)
        before = self.waiting(store)

        def work() -> None:
            if lock.acquire(timeout_s):
                self.taken.append(name)

        thread = threading.Thread(target=work, daemon=True)
        self.threads[thread] = lock
        thread.start()
        wait_for(lambda: self.waiting(store) > before)
        return lock

    def end(self) -> None:
        """Let every thread that still waits have the lock, so that none outlives its server."""

        def ended() -> bool:
            for lock in self.threads.values():
                release(lock)
            return not any(thread.is_alive() for thread in self.threads)

        wait_for(ended)

    def waiting(self, store: SqlStore) -> int:
        row = store.database.row("SELECT count(*) FROM {lock} WHERE namespace = :namespace")
        assert row is not None
        return int(row[0]) + len(store.database.line.waiters)

    def commit(self, store: SqlStore, lock: TimedLock) -> None:
        cluster = store.refresh(None)
        assert cluster is not None
        now = store.now()
        change = granted(cluster, f"t{cluster.version}", now, gpus=1)
        store.commit(cluster.version, [change], now=now, lock=lock)


def lock_of(store: SqlStore) -> TimedLock:
    lock = store.lock()
    assert isinstance(lock, TimedLock)
    return lock


def release(lock: TimedLock) -> None:
    with suppress(LockError):
        lock.release()


@pytest.fixture
def clients(url: str) -> Iterator[Clients]:
    with ExitStack() as stack:
        clients = Clients(url, stack)
        started(clients.open())
        yield clients
        clients.end()


def test_a_commit_hands_the_lock_to_another_process(clients: Clients) -> None:
    here, there = clients.open(), clients.open(Line())
    lock = clients.take(here)
    clients.wait(there, "there")
    clients.commit(here, lock)
    wait_for(lambda: clients.taken == ["there"])
    lock.release()
    assert clients.taken == ["there"], "it was released before"


def test_a_commit_hands_the_lock_to_the_next_thread_which_may_commit(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = clients.open(), clients.open()
    lock = lock_of(first)
    assert lock.acquire(5)
    following = clients.wait(second, "second")
    monkeypatch.setattr(following, "renew", lambda: None)  # which its process does within a second
    clients.commit(first, lock)
    wait_for(lambda: clients.taken == ["second"])
    lock.release()
    assert 3 < following.remaining_s <= 5
    clients.commit(second, following)
    following.release()
    clients.take(first)


def test_other_processes_get_their_turn(clients: Clients) -> None:
    store, line = clients.open(), Line()
    lock = clients.take(store)
    clients.wait(clients.open(line), "there")
    here = {f"here {k}": clients.open() for k in range(MAX_PASSES + 1)}
    waiting = {name: clients.wait(client, name) for name, client in here.items()}
    clients.commit(store, lock)
    lock.release()
    for count, (name, client) in enumerate(list(here.items())[:-1], 1):
        wait_for(lambda count=count: len(clients.taken) == count)  # type: ignore[misc]
        assert clients.taken[-1] == name
        clients.commit(client, waiting[name])
        waiting[name].release()
    wait_for(lambda: len(clients.taken) == MAX_PASSES + 1)
    assert clients.taken[-1] == "there"


def test_a_thread_that_leaves_does_not_keep_what_was_meant_for_it(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = clients.open(), clients.open()
    lock = clients.take(first)
    clients.wait(second, "second", timeout_s=0.2)
    commit = first.database.dialect.commit

    def slow(*args: Any) -> tuple[bool, float | None]:
        answer = commit(*args)
        wait_for(lambda: not first.database.line.waiters)
        return answer

    monkeypatch.setattr(first.database.dialect, "commit", slow)
    clients.commit(first, lock)
    assert clients.taken == []
    clients.take(first, 2)  # well before what was handed on expires


# ---- a lock that is lost, or whose holder or waiter is dead ----


def change(store: SqlStore, statement: str, **values: Any) -> None:
    assert store.database.change(f"{statement} WHERE namespace = :namespace", **values)


def lock_expires_in(store: SqlStore, seconds: float) -> None:
    change(store, "UPDATE {state} SET lock_expires_at = {now} + :seconds", seconds=seconds)


def left_s(store: SqlStore, table: str, column: str) -> float:
    row = store.database.row(f"SELECT {column} - {{now}} FROM {{{table}}} WHERE namespace = :namespace")
    assert row is not None
    return float(row[0])


def stand_in_line(store: SqlStore, heartbeat_s: float) -> None:
    database = store.database
    values = {"namespace": database.namespace, "token": token_hex(12), "heartbeat_s": heartbeat_s}
    database.run(lambda connection: database.dialect.enter(connection, values))


def test_a_holder_that_lost_the_lock_does_not_affect_the_next_holder(clients: Clients) -> None:
    here, there = clients.open(), clients.open(Line())
    late, following = lock_of(here), lock_of(there)
    assert late.acquire(0)
    assert not following.acquire(0)
    lock_expires_in(here, -1)
    assert following.acquire(0)
    lock_expires_in(here, 4)
    for act in late.renew, late.release:
        with pytest.raises(LockError, match="lost"):
            act()
    assert left_s(there, "state", "lock_expires_at") <= 4, "it was not the lost lock's to renew"
    assert not clients.open(Line()).lock().acquire(0)
    following.renew()
    assert left_s(there, "state", "lock_expires_at") > 5
    following.release()
    clients.take(here, 0)


def test_waiters_are_not_overtaken_when_a_holder_dies(clients: Clients) -> None:
    holder = clients.open(Line())
    clients.take(holder)
    first = clients.wait(clients.open(Line()), "first")
    clients.wait(clients.open(Line()), "second")
    lock_expires_in(holder, 0.3)
    wait_for(lambda: clients.taken == ["first"])
    assert left_s(holder, "state", "lock_expires_at") > 3
    assert not clients.open(Line()).lock().acquire(0)
    first.release()
    wait_for(lambda: clients.taken == ["first", "second"])


def test_a_free_lock_is_for_who_waits_unless_they_are_dead(clients: Clients) -> None:
    store, other = clients.open(Line()), clients.open(Line())
    stand_in_line(other, -1)
    clients.take(store, 0).release()
    stand_in_line(other, 60)
    assert not store.lock().acquire(0)
    assert not store.lock().acquire(0.05)
    assert clients.waiting(store) == 2, "who gives up leaves, and nobody else"


def test_whom_a_clock_that_was_set_back_keeps_alive_ends_in_time(clients: Clients) -> None:
    """A holder and a waiter that died before it, in the eyes of one who waits behind them."""
    store, other = clients.open(Line()), clients.open(Line())
    dead = lock_of(store)
    assert dead.acquire(0)
    dead.let_expire()
    stand_in_line(store, 3600)
    lock_expires_in(store, 3600)
    clients.wait(other, "other")
    wait_for(lambda: left_s(store, "state", "lock_expires_at") <= 10)
    wait_for(lambda: left_s(store, "lock", "max(expires_at)") <= 5)  # in a transaction of its own
    for table, column in {"state": "lock_expires_at", "lock": "expires_at"}.items():
        change(store, f"UPDATE {{{table}}} SET {column} = {{now}} + 1.2")  # beyond the next look
    wait_for(lambda: clients.taken == ["other"])


class SleptTime(Clock):
    """The module `time` on a clock that only sleep moves."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> SleptTime:
    time = SleptTime()
    monkeypatch.setattr(dialect, "time", time)
    return time


def test_a_poller_looks_less_often_the_longer_it_waits(steady: SleptTime) -> None:
    poller = dialect.Poller(dialect.Pace())
    for _ in range(60):
        poller.wait(60.0, 0)
    assert steady.slept == sorted(steady.slept)
    assert steady.slept[0] == dialect.MIN_POLL_S
    assert steady.slept[-1] == dialect.POLL_S
    assert sum(steady.slept) > 1.5
    poller.wait(0.01, 0)
    assert steady.slept[-1] == 0.01, "no longer than it may"


@pytest.mark.parametrize("turn_s", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("believed_s", [dialect.MIN_POLL_S, dialect.MAX_TURN_S])
def test_pollers_learn_how_long_a_turn_takes(steady: SleptTime, turn_s: float, believed_s: float) -> None:
    """After some claims a waiter behind 30 others looks seldom, and does not oversleep its turn."""
    pace = dialect.Pace()
    pace.turn_s = believed_s
    for claim in range(30):
        poller, entered_at, looks_before = dialect.Poller(pace), steady.now, len(steady.slept)
        while (ahead := 30 - int((steady.now - entered_at) / turn_s)) >= 0:
            poller.wait(60.0, ahead)
        poller.came()
        late_s = steady.now - (entered_at + 31 * turn_s)
        if claim >= 15:
            assert late_s < max(turn_s, 2 * dialect.MIN_POLL_S)
            assert len(steady.slept) - looks_before <= 40
