"""The queue with its estimates: what costs much is computed by one thread for all who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.results import QueueEntry
from resource_manager.storage import Store

T = TypeVar("T")

MAX_ESTIMATE_S = 1.0
"""Processor time after which the starts that are left are not estimated."""

CHEAP_S = 0.05
"""Processor time up to which the queue is computed anew for each state."""

REST = 4.0
"""A dear one is kept for so many times of what it cost."""

SAME_S = 1.0
"""Time for which the queue of one state is kept: waits grow meanwhile."""

MAX_AGE_S = 10.0


class QueueView:
    """The newest queue, on a replica of its own: neither decisions nor other reads wait for it; thread-safe.

    It is that of the newest state, or at most `MAX_AGE_S` old where it costs much.
    """

    def __init__(self, store: Store, compute: Reader[list[QueueEntry]]) -> None:
        self._store = store
        self._replica = Replica(store)
        self._compute = compute
        self._mutex = threading.Lock()
        self._version = -1
        self._at = 0.0
        self._cost_s = 0.0
        self._entries: list[QueueEntry] = []

    def entries(self) -> list[QueueEntry]:
        """Return the queue; who asks while it is computed shares the answer."""
        with self._mutex, self._replica:
            cluster, now = self._replica.refresh(), self._store.now()
            if not self._is_kept(cluster.version, now - self._at):
                began = time.thread_time()
                self._entries = self._compute(cluster, now)
                self._version, self._at, self._cost_s = cluster.version, now, time.thread_time() - began
            return [entry.copy() for entry in self._entries]

    def look(self, reader: Reader[T]) -> T:
        """Return the answer of a reader that costs much, on the newest state."""
        with self._mutex, self._replica:
            return reader(self._replica.refresh(), self._store.now())

    def _is_kept(self, version: int, age_s: float) -> bool:
        kept_s = min(REST * self._cost_s, MAX_AGE_S) if self._cost_s > CHEAP_S else 0.0
        if version == self._version:
            kept_s = max(kept_s, SAME_S)
        return self._version >= 0 and 0 <= age_s < kept_s


def for_a_while() -> Callable[[], bool]:
    """Return a function that is true until this thread has computed for `MAX_ESTIMATE_S`."""
    ends_at = time.thread_time() + MAX_ESTIMATE_S
    return lambda: time.thread_time() < ends_at
