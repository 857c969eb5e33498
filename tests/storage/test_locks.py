"""The contract of every lock: one holder, order of arrival, a token for each claim, exact timeouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from resource_manager.errors import LockError
from resource_manager.storage.locks import Lock, Meanwhile, ThreadLock, ThreadMutex, TimedLock, renewals
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.lock import SqlLock
from tests.eventually import wait_for
from tests.forked import in_child
from tests.redis_server import RedisServer
from tests.sql_servers import DATABASES

MakeLock = Callable[[], Lock]


@dataclass
class Claims:
    """Claims on one lock, and the number of its waiters."""

    make: MakeLock
    pending: Callable[[], int]


SQL = ("sqlite", *DATABASES)


@pytest.fixture(params=["thread", "embedded_redis", "system_redis", *SQL])
def claims(request: pytest.FixtureRequest) -> Iterator[Claims]:
    if request.param == "thread":
        mutex = ThreadMutex()
        yield Claims(lambda: ThreadLock(mutex), lambda: len(mutex.waiters))
    elif request.param in SQL:
        url = request.getfixturevalue(request.param).fresh_url()
        with closing(Database(url)) as database:
            count = "SELECT count(*) FROM {lock} WHERE namespace = :namespace"
            line = database.line
            yield Claims(lambda: SqlLock(database), lambda: one(database.row(count)) + len(line.waiters))
    else:
        with closing(RedisClient.from_url(request.getfixturevalue(request.param).fresh_url())) as client:
            waiters = client.key("lock:waiters")
            yield Claims(lambda: RedisLock(client), lambda: client.driver.llen(waiters))


def one(row: Any) -> int:
    return int(row[0])


def token_of(lock: Lock) -> str:
    return lock.token if isinstance(lock, TimedLock) else ""  # threads tell a claim by the object


@pytest.fixture
def make_lock(claims: Claims) -> MakeLock:
    return claims.make


def test_one_holder_at_a_time(make_lock: MakeLock) -> None:
    first, second = make_lock(), make_lock()
    assert first.acquire(1)
    assert not second.acquire(0)
    assert not second.acquire(0.05)
    first.release()
    assert second.acquire(1)
    second.release()


def test_it_tells_whether_it_had_to_wait(make_lock: MakeLock) -> None:
    first, second = make_lock(), make_lock()
    assert first.acquire(1)
    assert not first.waited
    timer = threading.Timer(0.05, first.release)
    timer.start()
    assert second.acquire(30)
    timer.join()
    assert second.waited
    second.release()
    assert second.acquire(1)
    assert not second.waited
    second.release()


def test_a_lock_object_can_be_used_again(make_lock: MakeLock) -> None:
    lock = make_lock()
    seen = []
    for _ in range(3):
        assert lock.acquire(1)
        seen.append(token_of(lock))
        lock.release()
    assert len(set(seen)) == (1 if isinstance(lock, ThreadLock) else 3)


def test_a_lock_object_is_one_claim(make_lock: MakeLock) -> None:
    lock = make_lock()
    assert lock.acquire(1)
    with pytest.raises(LockError, match=r"^this lock object is in use already; create one for each"):
        lock.acquire(0)
    lock.release()
    assert lock.acquire(0)
    lock.release()


def test_a_short_timeout_does_not_wait_long(make_lock: MakeLock) -> None:
    holder = make_lock()
    assert holder.acquire(1)
    begin = time.monotonic()
    assert not any(make_lock().acquire(0) for _ in range(15))
    assert not any(make_lock().acquire(0.02) for _ in range(15))
    assert time.monotonic() - begin < 14
    holder.release()


def test_acquire_waits_for_its_timeout(make_lock: MakeLock) -> None:
    holder, waiter = make_lock(), make_lock()
    assert holder.acquire(1)
    begin = time.monotonic()
    assert not waiter.acquire(0.3)
    assert 0.25 < time.monotonic() - begin < 5
    holder.release()


def test_release_without_holding_is_an_error(make_lock: MakeLock) -> None:
    with pytest.raises(LockError, match=r"^released a lock that is not held$"):
        make_lock().release()
    lock = make_lock()
    assert lock.acquire(1)
    lock.release()
    with pytest.raises(LockError, match=r"^released a lock that is not held$"):
        lock.release()


@pytest.mark.parametrize("failure", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_lock_that_this_process_cannot_renew_is_given_back(
    make_lock: MakeLock, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, other = make_lock(), make_lock()
    if isinstance(lock, ThreadLock):
        pytest.skip("it ends with its process: nothing renews it")

    def fail(lock: Lock) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(renewals, "watch", fail)
        with pytest.raises(type(failure)):
            lock.acquire(1)
    assert other.acquire(0)
    other.release()
    assert lock.acquire(0)
    lock.release()


def test_waiters_get_the_lock_in_order_of_arrival(claims: Claims) -> None:
    make_lock, holder = claims.make, claims.make()
    assert holder.acquire(1)
    order: list[int] = []
    tokens = [token_of(holder)]

    def wait(number: int) -> None:
        lock = make_lock()
        assert lock.acquire(20)
        order.append(number)
        tokens.append(token_of(lock))
        lock.release()

    threads = []
    for number in range(12):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        wait_for(lambda: claims.pending() > number)  # noqa: B023 - it is over before the next
    holder.release()
    for thread in threads:
        thread.join()
    assert order == list(range(12))
    assert isinstance(holder, ThreadLock) or len(set(tokens)) == 13, "each claim has a token of its own"


def test_waiters_that_gave_up_do_not_delay_the_others(claims: Claims) -> None:
    make_lock = claims.make
    holder, patient = make_lock(), make_lock()
    assert holder.acquire(1)
    gave_up = [make_lock() for _ in range(9)]
    assert not any(lock.acquire(0.01) for lock in gave_up)
    got = threading.Event()
    thread = threading.Thread(target=lambda: got.set() if patient.acquire(30) else None)
    thread.start()
    wait_for(claims.pending)
    holder.release()
    assert got.wait(5)
    thread.join()
    patient.release()


def test_many_threads_exclude_each_other(make_lock: MakeLock) -> None:
    inside = 0
    worst = 0

    def work() -> None:
        nonlocal inside, worst
        lock = make_lock()
        for _ in range(20):
            assert lock.acquire(30)
            inside += 1
            worst = max(worst, inside)
            time.sleep(0.0005)  # time for another holder to enter, if the lock failed
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1


# ---- locks that this process renews ----


class CountedLock(TimedLock):
    """A lock that anybody gets, and that counts how often it is renewed."""

    def __init__(self) -> None:
        super().__init__(life_s=0.06)
        self.renewed = 0

    def _claim(self, token: str, deadline: float, meanwhile: Meanwhile) -> float:
        return time.monotonic()

    def _extend(self, token: str) -> bool:
        self.renewed += 1
        return True

    def _hand_on(self, token: str) -> bool:
        return True


class SlowLock(CountedLock):
    """One at which its thread stands still, just as it is noted down as one to be renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.over = threading.Event(), threading.Event()

    def __hash__(self) -> int:
        self.inside.set()
        self.over.wait(60)
        return 0


def test_a_forked_child_renews_its_own_locks_and_waits_for_no_thread_of_its_parent() -> None:
    """As where PyTorch forks its workers while another thread claims a lock: the child hung for good."""
    parents, slow = CountedLock(), SlowLock()
    assert parents.acquire(0)
    thread = threading.Thread(target=slow.acquire, args=(0,))
    thread.start()
    assert slow.inside.wait(60)

    def renewed_there() -> int:
        before, own = parents.renewed, CountedLock()
        assert own.acquire(0)
        wait_for(lambda: own.renewed > 2)
        return parents.renewed - before

    try:
        assert in_child(renewed_there) == 0
    finally:
        slow.over.set()
        thread.join()
        slow.release()
        parents.release()


# ---- locks between threads: a hand-off at the moment of the timeout ----


class Turn:
    """A waiter's semaphore that runs `meanwhile` during the wait."""

    def __init__(self, lock: ThreadLock, meanwhile: Callable[[], None]) -> None:
        self.permits = lock._handoff
        self.meanwhile = meanwhile

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if timeout is None:
            return self.permits.acquire(blocking)
        self.meanwhile()
        return False

    def release(self) -> None:
        self.permits.release()


def pending(mutex: ThreadMutex, meanwhile: Callable[[], None]) -> ThreadLock:
    lock = ThreadLock(mutex)
    lock._handoff = Turn(lock, meanwhile)  # type: ignore[assignment]
    return lock


def test_a_hand_off_at_the_timeout_is_accepted() -> None:
    mutex = ThreadMutex()
    holder = ThreadLock(mutex)
    assert holder.acquire(0)
    late = pending(mutex, holder.release)
    assert late.acquire(1)
    assert mutex.holder is late
    late.release()
    # The hand-off was consumed: it does not count a second time.
    assert holder.acquire(0)
    late._handoff = late._handoff.permits  # type: ignore[attr-defined]
    assert not late.acquire(0)
    holder.release()


@pytest.fixture
def on_redis(embedded_redis: RedisServer) -> Iterator[RedisClient]:
    with closing(RedisClient.from_url(embedded_redis.fresh_url())) as client:
        yield client


def test_a_waiter_on_redis_works_meanwhile(on_redis: RedisClient) -> None:
    holder, waiter = RedisLock(on_redis), RedisLock(on_redis)
    assert holder.acquire(1)
    calls: list[None] = []

    def work() -> None:
        calls.append(None)
        if len(calls) == 3:
            holder.release()

    assert waiter.acquire(30, work)
    assert len(calls) == 3
    waiter.release()


def test_a_waiter_whose_work_fails_leaves_the_queue(on_redis: RedisClient) -> None:
    holder = RedisLock(on_redis)
    assert holder.acquire(1)
    with pytest.raises(KeyboardInterrupt):
        RedisLock(on_redis).acquire(30, interrupt)
    assert on_redis.driver.llen(on_redis.key("lock:waiters")) == 0
    holder.release()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_waiter_leaves_the_queue() -> None:
    mutex = ThreadMutex()
    holder = ThreadLock(mutex)
    assert holder.acquire(0)
    with pytest.raises(KeyboardInterrupt):
        pending(mutex, interrupt).acquire(1)
    assert not mutex.waiters
    holder.release()
    assert mutex.holder is None


def test_a_waiter_interrupted_at_its_hand_off_releases_the_lock() -> None:
    mutex = ThreadMutex()
    holder = ThreadLock(mutex)
    assert holder.acquire(0)

    def at_its_turn() -> None:
        holder.release()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        pending(mutex, at_its_turn).acquire(1)
    assert mutex.holder is None
