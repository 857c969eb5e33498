"""Locks that order the commits of several managers; safety comes from the version, not from the lock."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from resource_manager.errors import LockError, StoreUnavailableError

LOCK_TTL_S = 10.0
"""Time to live of a lock without renewal."""

Meanwhile = Callable[[], object]


def nothing() -> None:
    """Do nothing while waiting."""


class Lock(Protocol):
    """One claim on a lock, for one acquirer and one thread at a time.

    `waited` tells whether another held the lock when it was asked for; `is_fresh`, whether the replica that
    it was made for has been brought up to date under it.
    """

    waited: bool
    is_fresh: bool

    def acquire(self, timeout_s: float, meanwhile: Meanwhile = nothing) -> bool:
        """Wait in order of arrival; return False if the lock was not acquired within `timeout_s` seconds.

        `meanwhile` may be called again and again during a long wait.
        """

    def release(self) -> None:
        """Hand the lock to the next waiter, unless a commit under it did; `LockError` if it is not held."""


class ThreadMutex:
    """The holder and the waiters that the `ThreadLock`s of one process share."""

    __slots__ = ("__weakref__", "guard", "holder", "waiters")

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.holder: ThreadLock | None = None
        self.waiters: deque[ThreadLock] = deque()


class ThreadLock:
    """A first come, first served lock between the threads of one process."""

    __slots__ = ("_handoff", "_mutex", "is_fresh", "waited")

    def __init__(self, mutex: ThreadMutex) -> None:
        self.waited = self.is_fresh = False
        self._mutex = mutex
        self._handoff = threading.Semaphore(0)

    def acquire(self, timeout_s: float, meanwhile: Meanwhile = nothing) -> bool:
        mutex = self._mutex
        with mutex.guard:
            if mutex.holder is self or self in mutex.waiters:
                raise LockError("this lock object is in use already; create one for each acquirer")
            self.waited = mutex.holder is not None
            if not self.waited:
                mutex.holder = self
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
            mutex.holder = following = mutex.waiters.popleft() if mutex.waiters else None
            # Still under the guard: a waiter that gives up finds itself either queued or holding the lock.
            if following is not None:
                following._handoff.release()


class TimedLock(ABC):
    """A claim on a lock that a server keeps, with a time to live of `life_s` seconds.

    A lock held for more than a third of its time to live is renewed by a thread of this process until it is
    released.

    Such a lock orders work but cannot protect data, because a holder may sleep through its own expiry:

        0.0 s   A acquires the lock (time to live 10 s) and reads version 7
        0.1 s   A stops: swapped out, suspended, a long garbage collection
       10.1 s   the lock expires; B acquires it, reads version 7 and commits version 8
       12.0 s   A continues as if it held the lock, and writes its decision from version 7

    That write is refused: a commit names the version it started from and the token it holds, and the store
    compares both. A learns of the loss by `StaleStateError`, or by `LockError` when it renews or releases.
    """

    def __init__(self, life_s: float) -> None:
        self.waited = self.is_fresh = False
        self._life_s = life_s
        self.token = ""
        """Text by which the server knows this claim, empty while it is not acquired."""
        self._is_released = False
        self._alive_since = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lock is certainly held, by this process's steady clock; 0 if it is not."""
        if not self.token:
            return 0.0
        return max(self._alive_since + self._life_s - time.monotonic(), 0.0)

    def acquire(self, timeout_s: float, meanwhile: Meanwhile = nothing) -> bool:
        if self.token:
            raise LockError("this lock object is in use already; create one for each acquirer")
        deadline = time.monotonic() + timeout_s
        token = os.urandom(12).hex()
        since = self._claim(token, deadline, meanwhile)
        if since is None:
            return False
        self.token, self._is_released, self._alive_since = token, False, since
        try:
            renewals.watch(self)
        except BaseException:  # no thread can be started, or a signal came: nobody else would release it
            with suppress(LockError, StoreUnavailableError):
                self.release()
            raise
        return True

    def renew(self) -> None:
        """Restart the lock's time to live; raises `LockError` if the lock was lost."""
        token = self.token
        if not token:
            raise LockError("renewed a lock that is not held")
        since = time.monotonic()
        if not self._extend(token):
            raise self._lost()
        self._alive_since = since

    def release(self) -> None:
        token, self.token = self.token, ""
        if self._is_released:
            return
        if not token:
            raise LockError("released a lock that is not held")
        renewals.forget(self)
        if not self._hand_on(token):
            raise self._lost()

    def let_expire(self) -> None:
        """Let the lock expire by itself, because a write made under it may still arrive."""
        self.token = ""
        renewals.forget(self)

    def released(self) -> None:
        """Note that the server has released the lock, with a commit under it."""
        self.let_expire()
        self._is_released = True

    def _lost(self) -> LockError:
        return LockError(f"the lock was lost: it was held beyond its time to live of {self._life_s:g} s")

    @abstractmethod
    def _claim(self, token: str, deadline: float, meanwhile: Meanwhile) -> float | None:
        """Wait for the lock; return when its life began, by the steady clock, None if it was not acquired."""

    @abstractmethod
    def _extend(self, token: str) -> bool:
        """Restart the lock's time to live on the server; return False if another holds it or nobody."""

    @abstractmethod
    def _hand_on(self, token: str) -> bool:
        """Free the lock on the server for the next waiter; return False if another holds it or nobody."""


class _Renewals:
    """A thread that renews the locks this process holds for long; it ends when idle."""

    IDLE_ROUNDS = 50

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[TimedLock] = set()
        self._thread: threading.Thread | None = None
        self._round_s = LOCK_TTL_S / 10

    def watch(self, lock: TimedLock) -> None:
        with self._changed:
            self._held.add(lock)
            if lock._life_s / 10 < self._round_s:
                self._round_s = lock._life_s / 10
                self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="gpu-manager-renewals", daemon=True)
                self._thread.start()

    def forget(self, lock: TimedLock) -> None:
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
# No thread of a forked child goes on with what one of the parent began, and the parent renews its own locks.
os.register_at_fork(after_in_child=renewals.__init__)  # type: ignore[misc]
