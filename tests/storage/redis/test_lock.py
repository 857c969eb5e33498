"""The lock in Redis: its keys, its hand-off, and the thread that renews it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from resource_manager.errors import LockError, StoreUnavailableError
from resource_manager.storage.locks import LOCK_TTL_S, _Renewals
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.lock import HEARTBEAT_S, RedisLock
from resource_manager.storage.redis.store import RedisStore
from tests.eventually import wait_for
from tests.redis_server import RedisServer
from tests.storage.walk import granted, started


@pytest.fixture
def url(embedded_redis: RedisServer) -> str:
    return embedded_redis.fresh_url()


@pytest.fixture
def client(url: str) -> Iterator[RedisClient]:
    with closing(RedisClient.from_url(url)) as client:
        yield client


class Waiter(RedisLock):
    """A lock that does as its test says where it would wait in Redis."""

    def __init__(self, client: RedisClient, wait: Callable[[float], list[int] | None]) -> None:
        super().__init__(client)
        self.wait = wait

    def _wait(self, token: str, wait_s: float) -> list[int]:
        answer = self.wait(wait_s)
        return super()._wait(token, wait_s) if answer is None else answer


def start(lock: RedisLock, timeout_s: float = 10.0) -> tuple[threading.Thread, list[bool]]:
    """Acquire in a thread; the list receives the result."""
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout_s)))
    thread.start()
    return thread, got


def lives_s(client: RedisClient) -> dict[str, float]:
    """Return the remaining time to live of each key of the lock, by the end of its name; below 0: none."""
    keys = [os.fsdecode(key) for key in client.driver.keys(client.key("lock") + "*")]
    return {key.rpartition(":")[2]: client.driver.pttl(key) / 1000 for key in keys}


# ---- keys in Redis ----


def test_a_held_lock_has_a_time_to_live(client: RedisClient) -> None:
    lock = RedisLock(client)
    assert lock.remaining_s == 0
    assert lock.acquire(1)
    assert LOCK_TTL_S - 5 < lives_s(client)["lock"] <= LOCK_TTL_S
    assert LOCK_TTL_S - 5 < lock.remaining_s <= LOCK_TTL_S
    assert client.driver.get(client.key("lock")) == lock.token.encode()
    lock.release()
    assert lock.remaining_s == 0
    assert lives_s(client).keys() == {"server"}


def ask(lock: RedisLock, step: str, token: str) -> list[int]:
    """Call the lock's script once, as a client does that dies before it asks again."""
    return lock._step(step, token)


HANDOFF_MS = 4000


@pytest.fixture
def slow_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unclaimed hand-off lasts longer than any process of the test may pause."""
    for module in ("lock", "store"):
        monkeypatch.setattr(f"resource_manager.storage.redis.{module}.HANDOFF_MS", HANDOFF_MS)


@pytest.mark.usefixtures("slow_hand_off")
def test_the_keys_of_a_waiter_have_a_time_to_live(client: RedisClient) -> None:
    holder, waiter = RedisLock(client), RedisLock(client)
    assert holder.acquire(1)
    assert ask(waiter, "acquire", "dead")[0] == 0
    assert 0 < lives_s(client)["dead"] <= HEARTBEAT_S
    holder.release()
    lives = lives_s(client)
    assert 0 < lives["lock"] <= HANDOFF_MS / 1000, "an unclaimed hand-off"
    assert 0 < lives["dead"] <= HANDOFF_MS / 1000, "the list that wakes the waiter"


@pytest.mark.parametrize("holder_dies", [False, True])
def test_a_claimed_hand_off_has_the_full_time_to_live(client: RedisClient, holder_dies: bool) -> None:
    holder, waiter = RedisLock(client), RedisLock(client)
    assert holder.acquire(1)
    thread, got = start(waiter)
    wait_for(lambda: client.driver.llen(client.key("lock:waiters")))
    if holder_dies:
        client.driver.pexpire(client.key("lock"), 1)
    else:
        holder.release()
    thread.join()
    assert got == [True]
    assert lives_s(client)["lock"] > LOCK_TTL_S - 5
    assert waiter.remaining_s > LOCK_TTL_S - 5
    waiter.release()
    if holder_dies:
        with pytest.raises(LockError, match="lost"):
            holder.release()


@pytest.mark.usefixtures("slow_hand_off")
def test_a_commit_hands_the_lock_it_held_to_the_next_waiter(client: RedisClient) -> None:
    store = RedisStore(client)
    mine, holder = started(store), store.lock()
    assert holder.acquire(1)
    assert ask(RedisLock(client), "acquire", "next")[0] == 0
    store.commit(mine.version, [granted(mine, "a", store.now())], now=store.now(), lock=holder)
    assert client.driver.get(client.key("lock")) == b"next"


def test_a_waiter_blocks_in_redis(client: RedisClient) -> None:
    begun: list[float] = []
    holder, waiter = RedisLock(client), Waiter(client, begun.append)
    assert holder.acquire(1)
    assert not waiter.acquire(0.4)
    assert len(begun) <= 2, "it asks again at its timeout, not all the time"
    holder.release()


def test_a_waiter_continues_after_a_script_flush(
    client: RedisClient,
) -> None:
    holder, waiter = RedisLock(client), RedisLock(client)
    assert holder.acquire(1)
    thread, got = start(waiter)
    wait_for(lambda: client.driver.llen(client.key("lock:waiters")))
    client.driver.script_flush()
    wait_for(lambda: client.driver.script_exists(waiter._script.sha)[0])  # the waiter asked again
    client.driver.script_flush()
    holder.release()
    thread.join()
    assert got == [True]
    waiter.release()


# ---- a lock that is lost, left to expire or handed over ----


def test_renewing_without_holding_is_an_error(client: RedisClient) -> None:
    with pytest.raises(LockError, match=r"^renewed a lock that is not held$"):
        RedisLock(client).renew()


def test_a_holder_that_lost_the_lock_does_not_affect_the_next_holder(client: RedisClient) -> None:
    late, owner = RedisLock(client), RedisLock(client)
    assert late.acquire(1)
    client.driver.delete(client.key("lock"))
    assert owner.acquire(1)
    with pytest.raises(LockError, match=r"^the lock was lost: it was held beyond its time to live of 10 s$"):
        late.renew()
    with pytest.raises(LockError, match=r"^the lock was lost: it was held beyond its time to live of 10 s$"):
        late.release()
    assert not RedisLock(client).acquire(0)
    owner.renew()
    owner.release()


def test_a_renewal_restarts_the_time_to_live(client: RedisClient) -> None:
    lock = RedisLock(client)
    assert lock.acquire(1)
    client.driver.pexpire(client.key("lock"), 3000)
    lock._alive_since -= LOCK_TTL_S - 3
    assert lock.remaining_s <= 3
    lock.renew()
    assert lives_s(client)["lock"] > LOCK_TTL_S - 5
    assert lock.remaining_s > LOCK_TTL_S - 5
    lock.release()


@pytest.mark.thorough
def test_a_lock_left_to_expire_stays_until_it_expires(client: RedisClient) -> None:
    lock = RedisLock(client, life_s=3.0)
    assert lock.acquire(1)
    lock.let_expire()
    assert (lock.remaining_s, lock.token) == (0, "")
    with pytest.raises(LockError, match=r"^released a lock that is not held$"):
        lock.release()
    assert not RedisLock(client).acquire(0)
    wait_for(lambda: not client.driver.exists(client.key("lock")))  # it is not renewed


def test_waiters_are_not_overtaken_when_a_holder_dies(client: RedisClient) -> None:
    holder, waiter = RedisLock(client), RedisLock(client)
    assert holder.acquire(1)
    assert ask(waiter, "acquire", "first")[0] == 0
    client.driver.delete(client.key("lock"))
    assert not RedisLock(client).acquire(0)
    assert ask(waiter, "acquire", "first")[0] == 1, "it was first"
    assert ask(waiter, "release", "first")


def test_a_waiter_that_gives_up_at_its_hand_off_releases_the_lock(client: RedisClient) -> None:
    def too_late(wait_s: float) -> list[int]:
        holder.release()  # for Redis, `late` is now the holder
        time.sleep(wait_s)
        return [0, 0]

    holder, late, following = RedisLock(client), Waiter(client, too_late), RedisLock(client)
    assert holder.acquire(1)
    assert not late.acquire(0.05)
    assert following.acquire(0), "at once, not when an unclaimed hand-off has expired"
    following.release()


def test_an_interrupted_waiter_leaves_the_queue(client: RedisClient) -> None:
    def interrupt(wait_s: float) -> None:
        raise KeyboardInterrupt

    holder, waiter = RedisLock(client), Waiter(client, interrupt)
    assert holder.acquire(1)
    with pytest.raises(KeyboardInterrupt):
        waiter.acquire(1)
    assert lives_s(client).keys() == {"lock", "server"}
    holder.release()
    assert waiter.acquire(0), "the lock object can be used again"
    waiter.release()


def test_a_lock_from_before_a_restart_is_dropped(own_redis: RedisServer) -> None:
    """The restarted server may have lost the holder's commits; new ones are refused in any case."""
    with closing(RedisClient.from_url(own_redis.url)) as client:
        before, after = RedisLock(client), RedisLock(client)
        assert before.acquire(1)
        own_redis.stop(signal.SIGKILL)
        own_redis.start()
        assert client.driver.exists(client.key("lock")), "it was kept"
        assert after.acquire(0)
        with pytest.raises(LockError, match="lost"):
            before.release()
        after.release()


@pytest.mark.thorough
def test_a_long_held_lock_is_renewed(client: RedisClient) -> None:
    lock, other = RedisLock(client, life_s=3.0), RedisLock(client, life_s=3.0)
    assert lock.acquire(1)
    assert not other.acquire(6)
    lock.release()
    assert other.acquire(1)
    other.release()


def test_dead_waiters_are_skipped(client: RedisClient) -> None:
    holder, patient = RedisLock(client), RedisLock(client)
    assert holder.acquire(1)
    client.driver.rpush(client.key("lock:waiters"), *(f"dead-{number}" for number in range(9)))
    got = threading.Event()
    thread = threading.Thread(target=lambda: got.set() if patient.acquire(30) else None)
    thread.start()
    wait_for(lambda: client.driver.llen(client.key("lock:waiters")) == 10)
    holder.release()
    assert got.wait(5), "nine hand-offs would have taken nine seconds"
    thread.join()
    patient.release()


def test_a_waiter_that_dies_at_its_hand_off_costs_its_claim_time(client: RedisClient) -> None:
    holder, patient = RedisLock(client), RedisLock(client)
    assert holder.acquire(1)
    client.driver.rpush(client.key("lock:waiters"), "dead")
    client.driver.set(client.key("lock:alive:dead"), 1, px=60_000)
    got = threading.Event()
    thread = threading.Thread(target=lambda: got.set() if patient.acquire(30) else None)
    thread.start()
    wait_for(lambda: client.driver.llen(client.key("lock:waiters")) == 2)
    begin = time.monotonic()
    holder.release()
    assert got.wait(20)
    assert 0.5 < time.monotonic() - begin < 8
    thread.join()
    patient.release()


def test_a_dead_holders_lock_expires(url: str) -> None:
    script = f"""
import os
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.storage.redis.client import RedisClient
assert RedisLock(RedisClient.from_url({url!r}), life_s=1.0).acquire(1)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    lock = RedisLock(RedisClient.from_url(url))
    begin = time.monotonic()
    assert lock.acquire(20)
    assert time.monotonic() - begin < LOCK_TTL_S - 1
    lock.release()


# ---- the thread that renews ----

ROUND_S = 0.01


class Held:
    """A stand-in for a held lock, as the renewing thread uses it."""

    _life_s = ROUND_S * 10

    def __init__(self, remaining: float, error: Exception | None = None) -> None:
        self.remaining_s = remaining * self._life_s
        self.error = error
        self.renewals = 0

    def renew(self) -> None:
        self.renewals += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def renewals() -> Iterator[_Renewals]:
    renewals = _Renewals()
    renewals.IDLE_ROUNDS = 3
    yield renewals
    for lock in list(renewals._held):
        renewals.forget(lock)
    wait_for(lambda: renewals._thread is None)  # idle, the thread ends


def watch(renewals: _Renewals, *locks: Held) -> None:
    for lock in locks:
        renewals.watch(lock)  # type: ignore[arg-type]


def test_a_lock_is_renewed_after_a_third_of_its_time_to_live(renewals: _Renewals) -> None:
    fresh, old = Held(0.7), Held(0.6)
    watch(renewals, fresh, old)
    wait_for(lambda: old.renewals > 1)
    assert not fresh.renewals


def test_a_lock_is_renewed_for_as_long_as_it_is_held(renewals: _Renewals) -> None:
    lock = Held(0.5)
    watch(renewals, lock)
    wait_for(lambda: lock.renewals > 10 * renewals.IDLE_ROUNDS)
    named = [thread for thread in threading.enumerate() if thread.name == "gpu-manager-renewals"]
    assert named
    assert all(thread.daemon for thread in named), "they do not keep a process from ending"
    renewals.forget(lock)  # type: ignore[arg-type]
    wait_for(lambda: renewals._thread is None)
    count = lock.renewals
    watch(renewals, lock)
    wait_for(lambda: lock.renewals > count)  # the next lock is renewed too


@pytest.mark.parametrize("error", [LockError("lost"), StoreUnavailableError("out")])
def test_a_failed_renewal_does_not_affect_other_locks(renewals: _Renewals, error: Exception) -> None:
    locks = [Held(0.5), Held(0.5, error), Held(0.5)]
    watch(renewals, *locks)
    wait_for(lambda: all(lock.renewals > 2 for lock in locks))
