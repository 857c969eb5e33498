"""Follower of the store: a replica for readers, trends from the history, change notices for open pages."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from resource_manager.core.changes import Change, Granted, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Lease
from resource_manager.errors import ResourceManagerError, StoreUnavailableError
from resource_manager.rest.observability.usage_history import UsageHistory
from resource_manager.storage import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL_S = 0.5
OUTAGE_S = 5.0
CHECK_S = 0.2
KEPT_NOTICES = 500
HISTORY_PAGE = 1000

Listener = Callable[[Change], None]


@dataclass(frozen=True, slots=True)
class ChangeNotice:
    """Notice of changes up to `version`: the ids of the changed servers, None if all may have changed."""

    version: int
    server_ids: frozenset[int] | None


class StateFollower:
    """Follower of a store: reads it every `interval_s` while pages are open and reports changes.

    It has its own replica, so that a slow page does not delay an allocation.
    """

    def __init__(self, store: Store, *, interval_s: float = INTERVAL_S) -> None:
        self.usage_history = UsageHistory()
        self._store = store
        self._interval_s = interval_s
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._replica: ClusterState | None = None
        self._read_at = float("-inf")
        self._mark = 0
        self._folded = 0
        self._notices: deque[ChangeNotice] = deque(maxlen=KEPT_NOTICES)
        self._oldest_notice = 0
        self._listeners: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def look(self, reader: Callable[[ClusterState, float], T]) -> T:
        """Return the reader's result for the newest state, which it must not change, and the store's time."""
        with self._lock:
            cluster = self._refresh()
            return reader(cluster, self._store.now())

    def check(self) -> None:
        """Raise `StoreError` if the store cannot be read; do not wait for who reads the replica.

        What they read is judged by its age: whoever waits for a silent store holds the replica too.
        """
        if self._lock.acquire(timeout=CHECK_S):
            try:
                self._refresh()
            finally:
                self._lock.release()
        elif time.monotonic() - self._read_at > OUTAGE_S:
            raise StoreUnavailableError(f"the store has not answered for {OUTAGE_S:g} s")

    def on_change(self, listener: Listener) -> None:
        """Call the listener with every change from now on, of any process; it must be quick."""
        with self._lock:
            self._refresh()
            self._listeners.append(listener)

    def wait(self, after: int, timeout_s: float) -> ChangeNotice | None:
        """Wait for a change after a version and return the notice; None after `timeout_s` without one.

        A version ahead of the replica's is that of another state, as of a store in memory before a restart.
        """
        self._start()
        with self._changed:
            self._changed.wait_for(lambda: self._version() != after or self._stop.is_set(), timeout_s)
        with self._lock:
            version = self._version()
            if version == after:
                return None
            if not self._oldest_notice <= after < version:
                return ChangeNotice(version, None)
            ids: set[int] = set()
            for item in self._notices:
                if item.version > after:
                    if item.server_ids is None:
                        return ChangeNotice(version, None)
                    ids |= item.server_ids
            return ChangeNotice(version, frozenset(ids))

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def _version(self) -> int:
        return 0 if self._replica is None else self._replica.version

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="gpu-manager-watch", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                with self._lock:
                    self._refresh()
            except Exception as error:  # such as a bug: pages that are open have nobody else
                is_known = isinstance(error, ResourceManagerError)
                logger.warning("the state could not be read: %s", error, exc_info=not is_known)
                self._stop.wait(OUTAGE_S)

    def _refresh(self) -> ClusterState:
        before = self._replica
        version = self._version()
        cluster = self._store.refresh(before)
        self._read_at = time.monotonic()
        if cluster is None:
            return ClusterState()  # nobody has applied a cluster yet
        self._replica = cluster
        if cluster is before and cluster.version == version:
            return cluster
        positions = cluster.changed_since(self._mark) if cluster is before else None
        self._mark = cluster.mark
        if positions is None:
            self._notices.clear()
            self._oldest_notice = cluster.version
            self._notices.append(ChangeNotice(cluster.version, None))
        else:
            if len(self._notices) == self._notices.maxlen:
                self._oldest_notice = self._notices[0].version
            ids = frozenset(cluster.nodes[position].node.server_id for position in positions)
            self._notices.append(ChangeNotice(cluster.version, ids))
        self._fold(cluster)
        if cluster is not before:  # the history does not record the leases that a reset ended
            self.usage_history.start_from(cluster.leases.values(), cluster.pending, _capacity_milli(cluster))
        with self._changed:
            self._changed.notify_all()
        return cluster

    def _fold(self, cluster: ClusterState) -> None:
        """Bring the trends to the replica's version with the changes of the history."""
        first = not self._folded
        while self._folded < cluster.version:
            page = self._store.history(self._folded, HISTORY_PAGE)
            if not page:
                break
            if first:
                self._begin(cluster, page[0][0])
                first = False
            for version, change in page:
                self.usage_history.add(change)
                for listener in self._listeners:
                    listener(change)
                self._folded = version
        if first:
            self._begin(cluster, cluster.version + 1)
        self._folded = max(self._folded, cluster.version)

    def _begin(self, cluster: ClusterState, first_version: int) -> None:
        """Start the trends before the first change in the history: the state now, without what came since."""
        began_later: set[str] = set()
        queued_later: set[str] = set()
        after = first_version - 1
        while page := self._store.history(after, HISTORY_PAGE):
            for _, change in page:
                if isinstance(change, Granted):
                    began_later.add(change.lease.lease_id)
                elif isinstance(change, Queued):
                    queued_later.add(change.request.lease_id)
            after = page[-1][0]
        before: list[Lease] = [
            lease for lease in cluster.leases.values() if lease.lease_id not in began_later
        ]
        self.usage_history.start_from(before, set(cluster.pending) - queued_later, _capacity_milli(cluster))


def _capacity_milli(cluster: ClusterState) -> int:
    return MILLI_PER_GPU * sum(len(state.gpu_free) for state in cluster.nodes)
