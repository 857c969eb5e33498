"""Locks that give order to the managers of one state; safety comes from the version, not from here."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from resource_manager.errors import LockError


class Lock(Protocol):
    """One claim on a lock: made for one acquirer, used by one thread at a time.

    `token` names this claim and `fencing` counts the acquisitions of the lock, this one included; both
    mean something only between `acquire` and `release`.
    """

    @property
    def token(self) -> str: ...

    @property
    def fencing(self) -> int: ...

    def acquire(self, timeout_s: float) -> bool:
        """Waits in order of arrival; False when the lock could not be had within `timeout_s` seconds."""

    def release(self) -> None:
        """Gives the lock to the next in line; raises `LockError` if it was not held, or lost meanwhile."""


class ThreadMutex:
    """What the `ThreadLock`s of one process share: who holds, who waits."""

    __slots__ = ("fencing", "guard", "holder", "waiters")

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.holder: ThreadLock | None = None
        self.waiters: deque[ThreadLock] = deque()
        self.fencing = 0

    def give_to(self, lock: ThreadLock | None) -> None:
        """Makes `lock` the holder; call with the guard held."""
        self.holder = lock
        if lock is not None:
            self.fencing += 1
            lock._fencing = self.fencing


class ThreadLock:
    """First come, first served between the threads of one process."""

    __slots__ = ("_fencing", "_mutex", "_turn")

    def __init__(self, mutex: ThreadMutex) -> None:
        self._mutex = mutex
        self._fencing = 0
        self._turn = threading.Semaphore(0)

    @property
    def token(self) -> str:
        return f"thread-{self._fencing}"

    @property
    def fencing(self) -> int:
        return self._fencing

    def acquire(self, timeout_s: float) -> bool:
        mutex = self._mutex
        with mutex.guard:
            if mutex.holder is self or self in mutex.waiters:
                raise LockError("this lock object is in use already; make one for each acquirer")
            if mutex.holder is None:
                mutex.give_to(self)
                return True
            mutex.waiters.append(self)
        try:
            came = self._turn.acquire(timeout=max(timeout_s, 0.0))
        except BaseException:
            if not self._give_up():
                self.release()
            raise
        return came or not self._give_up()

    def _give_up(self) -> bool:
        """Leaves the line; False if the turn came in the meantime."""
        with self._mutex.guard:
            if self._mutex.holder is not self:
                self._mutex.waiters.remove(self)
                return True
        self._turn.acquire(blocking=False)
        return False

    def release(self) -> None:
        mutex = self._mutex
        with mutex.guard:
            if mutex.holder is not self:
                raise LockError("released a lock that is not held")
            following = mutex.waiters.popleft() if mutex.waiters else None
            mutex.give_to(following)
        if following is not None:
            following._turn.release()
