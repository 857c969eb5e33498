"""Locks that order the commits of several managers; safety comes from the version, not from the lock."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import redis

from resource_manager.errors import LockError, StoreUnavailableError
from resource_manager.storage.redis.client import RedisClient, load_script


class Lock(Protocol):
    """One claim on a lock, for one acquirer and one thread at a time.

    `token` identifies this claim; it is valid only between `acquire` and `release`.
    """

    @property
    def token(self) -> str: ...

    def acquire(self, timeout_s: float) -> bool:
        """Wait in order of arrival; return False if the lock was not acquired within `timeout_s` seconds."""

    def release(self) -> None:
        """Hand the lock to the next waiter; raises `LockError` if it was not held, or was lost."""


class ThreadMutex:
    """The holder and the waiters that the `ThreadLock`s of one process share."""

    __slots__ = ("acquisitions", "guard", "holder", "waiters")

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.holder: ThreadLock | None = None
        self.waiters: deque[ThreadLock] = deque()
        self.acquisitions = 0

    def give_to(self, lock: ThreadLock | None) -> None:
        """Make `lock` the holder; call with the guard held."""
        self.holder = lock
        if lock is not None:
            self.acquisitions += 1
            lock._acquisition = self.acquisitions


class ThreadLock:
    """A first come, first served lock between the threads of one process."""

    __slots__ = ("_acquisition", "_handoff", "_mutex")

    def __init__(self, mutex: ThreadMutex) -> None:
        self._mutex = mutex
        self._acquisition = 0
        self._handoff = threading.Semaphore(0)

    @property
    def token(self) -> str:
        return f"thread-{self._acquisition}"

    def acquire(self, timeout_s: float) -> bool:
        mutex = self._mutex
        with mutex.guard:
            if mutex.holder is self or self in mutex.waiters:
                raise LockError("this lock object is in use already; create one for each acquirer")
            if mutex.holder is None:
                mutex.give_to(self)
                return True
            mutex.waiters.append(self)
        try:
            came = self._handoff.acquire(timeout=max(timeout_s, 0.0))
        except BaseException:
            if not self._give_up():
                self.release()
            raise
        return came or not self._give_up()

    def _give_up(self) -> bool:
        """Leave the waiters; return False if the lock was handed over in the meantime."""
        with self._mutex.guard:
            if self._mutex.holder is not self:
                self._mutex.waiters.remove(self)
                return True
        self._handoff.acquire(blocking=False)
        return False

    def release(self) -> None:
        mutex = self._mutex
        with mutex.guard:
            if mutex.holder is not self:
                raise LockError("released a lock that is not held")
            following = mutex.waiters.popleft() if mutex.waiters else None
            mutex.give_to(following)
            # Still under the guard: a waiter that gives up finds itself either queued or holding the lock.
            if following is not None:
                following._handoff.release()


LOCK_TTL_S = 10.0
HEARTBEAT_S = 3.0
HANDOFF_S = 1.0
WAIT_S = 1.0
"""Time to live of a lock without renewal, of a waiter's heartbeat and of an unclaimed hand-off, and limit
of one blocking read. Each is well above the delays of a busy machine and below what a user would notice."""


class RedisLock:
    """A first come, first served lock between all processes that reach one Redis server.

    The holder's token is stored under one key with a time to live. A release hands the key to the first
    waiter in the same script and wakes it through a list on which only that waiter blocks. Waiters send
    heartbeats and are skipped once these stop. A lock held for more than a third of its time to live is
    renewed by a thread of this process until it is released.

    Such a lock orders work but cannot protect data, because a holder may sleep through its own expiry:

        0.0 s   A acquires the lock (time to live 10 s) and reads version 7
        0.1 s   A stops: swapped out, suspended, a long garbage collection
       10.1 s   the lock expires; B acquires it, reads version 7 and commits version 8
       12.0 s   A continues as if it held the lock, and writes its decision from version 7

    That write is refused: a commit names the version it started from and the token it holds, and the store
    compares both. A learns of the loss by `StaleStateError`, or by `LockError` when it renews or releases.
    """

    def __init__(self, client: RedisClient, name: str = "lock", *, life_s: float = LOCK_TTL_S) -> None:
        self._client = client
        self._keys = (client.key(name), client.key(f"{name}:waiters"))
        self._life_s = life_s
        self._token: str | None = None
        self._alive_since = 0.0
        self._script = load_script("handover", "lock")

    @property
    def token(self) -> str:
        return self._token or ""

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lock is certainly held, by this process's steady clock; 0 if it is not."""
        if self._token is None:
            return 0.0
        return max(self._alive_since + self._life_s - time.monotonic(), 0.0)

    def acquire(self, timeout_s: float) -> bool:
        if self._token is not None:
            raise LockError("this lock object is in use already; create one for each acquirer")
        deadline = time.monotonic() + timeout_s
        token = os.urandom(12).hex()
        try:
            since = time.monotonic()
            is_held, ttl_ms = self._step("acquire", token)
            while not is_held:
                wait_s = min(deadline - time.monotonic(), WAIT_S)
                if wait_s <= 0:
                    self._step("leave", token)
                    return False
                if ttl_ms > 0:
                    wait_s = min(wait_s, ttl_ms / 1000 + 0.005)
                since = time.monotonic()
                is_held, ttl_ms = self._wait(token, wait_s)
        except StoreUnavailableError:
            raise
        except BaseException:
            with suppress(StoreUnavailableError):
                self._step("leave", token)
            raise
        self._token, self._alive_since = token, since
        renewals.watch(self)
        return True

    def renew(self) -> None:
        """Restart the lock's time to live; raises `LockError` if the lock was lost."""
        token = self._token
        if token is None:
            raise LockError("renewed a lock that is not held")
        since = time.monotonic()
        if not self._step("renew", token):
            raise LockError(f"the lock was lost: it was held beyond its time to live of {self._life_s:g} s")
        self._alive_since = since

    def release(self) -> None:
        token, self._token = self._token, None
        if token is None:
            raise LockError("released a lock that is not held")
        renewals.forget(self)
        if not self._step("release", token):
            raise LockError(f"the lock was lost: it was held beyond its time to live of {self._life_s:g} s")

    def let_expire(self) -> None:
        """Let the lock expire by itself, because a write made under it may still arrive."""
        self._token = None
        renewals.forget(self)

    def _args(self, step: str, token: str) -> tuple[str | int, ...]:
        life_ms, alive_ms, claim_ms = (round(s * 1000) for s in (self._life_s, HEARTBEAT_S, HANDOFF_S))
        return step, token, life_ms, alive_ms, claim_ms

    def _step(self, step: str, token: str) -> Any:
        return self._client.run(self._script, self._keys, self._args(step, token))

    def _wait(self, token: str, wait_s: float) -> list[int]:
        """Block until the hand-off or the timeout, then claim or send a heartbeat, in one round trip.

        The server runs the second command as soon as the first returns, even while this process is slow to
        wake up.
        """
        pipe = self._client.driver.pipeline(transaction=False)
        pipe.blpop([f"{self._keys[0]}:handoff:{token}"], max(wait_s, 0.001))
        pipe.evalsha(self._script.sha, len(self._keys), *self._keys, *self._args("acquire", token))
        with self._client.reporting():
            try:
                answer: list[int] = pipe.execute()[1]
            except redis.exceptions.NoScriptError:
                answer = self._step("acquire", token)
        return answer


class Renewable(Protocol):
    """A held lock with a time to live of `_life_s` seconds, of which `remaining_s` are left."""

    _life_s: float

    @property
    def remaining_s(self) -> float: ...

    def renew(self) -> None:
        """Restart the time to live; raises `LockError` if the lock was lost."""


class _Renewals:
    """A thread that renews the locks this process holds for long; it ends when idle."""

    IDLE_ROUNDS = 50

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[Renewable] = set()
        self._thread: threading.Thread | None = None
        self._round_s = LOCK_TTL_S / 10

    def watch(self, lock: Renewable) -> None:
        with self._changed:
            self._held.add(lock)
            if lock._life_s / 10 < self._round_s:
                self._round_s = lock._life_s / 10
                self._changed.notify()
            # A forked child inherits the object but not the thread; is_alive() detects that.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="gpu-manager-renewals", daemon=True)
                self._thread.start()

    def forget(self, lock: Renewable) -> None:
        with self._changed:
            self._held.discard(lock)

    def _run(self) -> None:
        idle_rounds = 0
        while True:
            with self._changed:
                self._changed.wait(self._round_s)
                held = list(self._held)
                idle_rounds = 0 if held else idle_rounds + 1
                if idle_rounds > self.IDLE_ROUNDS:
                    self._thread = None
                    self._round_s = LOCK_TTL_S / 10
                    return
            for lock in held:
                if lock.remaining_s < lock._life_s * 2 / 3:
                    # The holder discovers a lost lock itself; the next round retries after an outage.
                    with suppress(LockError, StoreUnavailableError):
                        lock.renew()


renewals = _Renewals()
