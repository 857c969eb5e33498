"""The queue with its estimates: what costs much is computed by one thread for all who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from resource_manager.core.cluster import ClusterState
from resource_manager.core.pending import PendingRequest
from resource_manager.manager import serializers
from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.results import QueueEntry
from resource_manager.scheduling.reasons.feasibility import standings
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import Store

T = TypeVar("T")

CHEAP_S = 0.05
"""Processor time up to which an answer is computed anew for each state.

The cheaper of the last two counts: a single one may have had to wait for a garbage collection.
"""

REST = 4.0
"""A dear one is kept for so many times of what it cost."""

CHEAP_ENTRIES_S, ENTRIES_REST = 0.01, 9.0
"""The same for the entries of single requests, for which all that wait ask: a tenth of a processor."""

SAME_S = 1.0
"""Time for which the queue of one state is kept: waits grow meanwhile."""

MAX_AGE_S = 10.0


class Age:
    """The state and time of which the last answer was, and what it cost."""

    def __init__(self, cheap_s: float = CHEAP_S, rest: float = REST) -> None:
        self._cheap_s, self._rest = cheap_s, rest
        self._version = -1
        self._at = 0.0
        self._cost_s = self._last_s = 0.0

    @property
    def is_cheap(self) -> bool:
        return self._version < 0 or self._cost_s <= self._cheap_s

    def is_fresh(self, version: int, now: float) -> bool:
        """Return whether the last answer is good for a state of that version."""
        kept_s = 0.0 if self.is_cheap else min(self._rest * self._cost_s, MAX_AGE_S)
        if version == self._version:
            kept_s = max(kept_s, SAME_S)
        return self._version >= 0 and 0 <= now - self._at < kept_s

    @contextmanager
    def measured(self, version: int, now: float) -> Iterator[None]:
        """Take note of an answer that is computed inside."""
        began = time.thread_time()
        yield
        cost_s = time.thread_time() - began
        self._version, self._at = version, now
        self._cost_s, self._last_s = min(cost_s, self._last_s), cost_s


class QueueView:
    """The newest queue, on a replica of its own: neither decisions nor other reads wait for it; thread-safe.

    It is that of the newest state, or at most `MAX_AGE_S` old where it costs much.
    """

    def __init__(self, store: Store, compute: Reader[list[QueueEntry]]) -> None:
        self._store = store
        self._replica = Replica(store)
        self._compute = compute
        self._mutex = threading.Lock()
        self._age = Age()
        self._entries: list[QueueEntry] = []

    def entries(self) -> list[QueueEntry]:
        """Return the queue; who asks while it is computed shares the answer."""
        asked_at = time.monotonic()
        with self._mutex, self._replica:
            cluster, now = self._replica.as_of(asked_at), self._store.now()
            if not self._age.is_fresh(cluster.version, now):
                with self._age.measured(cluster.version, now):
                    self._entries = self._compute(cluster, now)
            return [entry.copy() for entry in self._entries]

    def read(self, reader: Reader[T]) -> T:
        """Return the answer of a reader that costs much, on the newest state."""
        asked_at = time.monotonic()
        with self._mutex, self._replica:
            return reader(self._replica.as_of(asked_at), self._store.now())


class SharedEntries:
    """The entries of single requests, computed together once two are asked for of one state.

    The reason of a request's wait takes a walk over all that are ahead of it: of many that wait, each of
    which asks for its own, every one would take that walk. For readers of a state, of which there is one at
    a time.
    """

    def __init__(self) -> None:
        self._age = Age(CHEAP_ENTRIES_S, ENTRIES_REST)
        self._entries: dict[str, tuple[PendingRequest, QueueEntry]] = {}
        self._alone = (-1, 0.0)
        """Version and time of the state of which the last entry was computed alone."""

    def entry(self, cluster: ClusterState, lease_id: str, current: SchedulingPass) -> QueueEntry:
        """Return the entry of a pending request; its place and reason may be as old as the queue's."""
        version, now = cluster.version, current.now
        if not self._age.is_fresh(version, now):
            alone, at = self._alone
            if alone != version or not 0 <= now - at < SAME_S:
                self._alone = version, now
                return serializers.queue_entry(cluster, lease_id, current)
            with self._age.measured(version, now):
                self._entries = {
                    each.entry.lease_id: (each.entry, serializers.pending(each, cluster, now))
                    for each in standings(cluster, current)
                }
        request, entry = self._entries.get(lease_id, (None, None))
        if entry is None or request != cluster.pending[lease_id]:  # it has come since
            return serializers.queue_entry(cluster, lease_id, current)
        return {**entry, "waited_s": max(now - entry["queued_at"], 0.0)}


def for_a_while(limit_s: float) -> Callable[[], bool]:
    """Return a function that is true until this thread has computed for so long."""
    ends_at = time.thread_time() + limit_s
    return lambda: time.thread_time() < ends_at
