"""Follower of the store: a replica for readers, lives and trends from the history, notices for open pages."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from resource_manager.core.changes import Change, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.errors import ResourceManagerError, StoreUnavailableError
from resource_manager.manager.lease_changes import concerns_owners
from resource_manager.rest.answers import Trend
from resource_manager.rest.observability.usage_history import UsageHistory
from resource_manager.scheduling.accounting.lives import Life, Lives
from resource_manager.storage import Store
from resource_manager.storage.base import read_newest
from resource_manager.storage.history_file import before_changes
from resource_manager.storage.outage import SharedReading

logger = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL_S = 0.5
MIN_INTERVAL_S = 0.05
OUTAGE_S = 5.0
CHECK_S = 0.2
KEPT_NOTICES = 500
HISTORY_PAGE = 1000

KEPT_LIVES = 20_000
"""Leases that are over whose lives are known, for the timeline."""

Listener = Callable[[Change, Life | None], None]
"""It gets a change and the life that it is about, as it is after the change."""


@dataclass(frozen=True, slots=True)
class ChangeNotice:
    """Notice of changes up to `version`: the ids of the changed servers, None if all may have changed."""

    version: int
    server_ids: frozenset[int] | None


class StateFollower:
    """Follower of a store: reads it every `interval_s` while pages are open and reports changes.

    It has its own replica, so that a slow page does not delay an allocation. `lives` are those of leases up
    to the replica's version: to be read by a reader of `look` only.
    """

    def __init__(self, store: Store, *, interval_s: float = INTERVAL_S, outage_s: float = OUTAGE_S) -> None:
        self.lives = Lives(ClusterState().snapshot())
        self._usage_history = UsageHistory()
        self._store = store
        self._interval_s = interval_s
        self._outage_s = outage_s
        self._lock = threading.RLock()
        self._sharing = SharedReading()
        self._changed = threading.Condition()
        self._replica: ClusterState | None = None
        self._newest = ClusterState()
        """The replica; an empty state while nobody has applied a cluster."""
        self._read_at = float("-inf")
        self._mark = 0
        self._folded = 0
        self._leases_changed_at = 0
        self._is_walking = False
        self._notices: deque[ChangeNotice] = deque(maxlen=KEPT_NOTICES)
        self._oldest_notice = 0
        self._listeners: list[Listener] = []
        self._lookers: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._soon = threading.Event()

    def read(self, reader: Callable[[ClusterState, float], T]) -> T:
        """Return the reader's result for the newest state, which it must not change, and the store's time."""
        asked_at = time.monotonic()
        with self._lock:
            if self._sharing.is_due(asked_at):
                self._refresh()
            return reader(self._newest, self._store.now())

    def usage_history(self, hours: float) -> Trend:
        """Return what was in use and waited in the last hours."""
        return self.read(lambda cluster, now: self._usage_history.series(self.lives, hours, now))

    def check(self) -> None:
        """Raise `StoreError` if the store cannot be read; do not wait for who reads the replica.

        What they read is judged by its age: whoever waits for a silent store holds the replica too.
        """
        if self._lock.acquire(timeout=CHECK_S):
            try:
                self._refresh()
            finally:
                self._lock.release()
        elif time.monotonic() - self._read_at > self._outage_s:
            raise StoreUnavailableError(f"the store has not answered for {self._outage_s:g} s")

    def on_change(self, listener: Listener) -> None:
        """Call the listener with every change from now on, of any process; it must be quick."""
        with self._lock:
            self._refresh()
            self._listeners.append(listener)

    def wait(self, after: int, timeout_s: float) -> ChangeNotice | None:
        """Wait for a change after a version and return the notice; None after `timeout_s` without one.

        A version ahead of the replica's is that of another state, as of a store in memory before a restart.
        """
        self.follow()
        with self._changed:
            self._changed.wait_for(lambda: self._version() != after or self._stop.is_set(), timeout_s)
        with self._lock:
            version = self._version()
            if version == after:
                return None
            if not self._oldest_notice <= after < version:
                return ChangeNotice(version, None)
            ids = [notice.server_ids for notice in self._notices if notice.version > after]
            changed = None if None in ids else frozenset(chain.from_iterable(filter(None, ids)))
            return ChangeNotice(version, changed)

    def on_look(self, act: Callable[[], None]) -> None:
        """Call the function after every look of the thread that follows the store, changed or not."""
        self._lookers.append(act)

    def has_changed_leases(self, after: int) -> bool:
        """Return whether owners have to know of a change after that version, as of the last look."""
        return not self._leases_changed_at <= after <= self._version()

    def is_pending(self, lease_id: str) -> bool:
        """Return whether that request waits, as of the last look."""
        return lease_id in self._newest.pending

    def look_soon(self) -> None:
        """Have the thread that follows look now, rather than at its next time."""
        self._soon.set()

    def close(self) -> None:
        self._stop.set()
        self._soon.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    @property
    def is_silent(self) -> bool:
        """Whether the store has not answered two looks in a row: one alone may meet a fail-over."""
        return time.monotonic() - self._read_at > 2 * self._outage_s

    def _version(self) -> int:
        return 0 if self._replica is None else self._replica.version

    def follow(self) -> None:
        """Follow the store from now on, in a thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="gpu-manager-watch", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(MIN_INTERVAL_S):
            self._soon.wait(self._interval_s)
            self._soon.clear()
            try:
                with self._lock:
                    self._refresh()
            except Exception as error:
                self._complain("the state could not be read: %s", error)
                self._stop.wait(self._outage_s)
            self._tell()
        self._tell()  # that it has stopped: requests are held no longer

    def _tell(self) -> None:
        for act in self._lookers:
            try:
                act()
            except Exception as error:
                self._complain("who waits for changes of the state was not told: %s", error)

    @staticmethod
    def _complain(text: str, error: Exception) -> None:
        """Log an error, such as a bug, and go on: who waits for changes has nobody else."""
        logger.warning(text, error, exc_info=not isinstance(error, ResourceManagerError))

    def _refresh(self) -> None:
        with self._sharing.reading():
            self._catch_up()

    def _catch_up(self) -> None:
        before = self._replica
        version = self._version()
        cluster = read_newest(self._store, before)
        self._read_at = time.monotonic()
        self._newest = ClusterState() if cluster is None else cluster
        if cluster is None:
            return
        if cluster is before and cluster.version == version and self._folded >= version:
            return
        missed = self._missed(cluster.version)  # before the rest, which the next look does if this fails
        self._replica = cluster
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
        self._fold(cluster, missed)
        if cluster is not before:  # the history does not record the leases that a reset ended
            held = (*cluster.leases.values(), *cluster.remainders.values())
            self.lives.resume(held, cluster.pending.values())
            self._leases_changed_at = cluster.version
        with self._changed:
            self._changed.notify_all()

    def _missed(self, version: int) -> list[tuple[int, Change]]:
        """Return the changes of the history up to that version which the lives lack, or some more."""
        missed: list[tuple[int, Change]] = []
        last = self._folded
        while last < version and (page := self._store.history(last, HISTORY_PAGE)):
            missed += page
            last = page[-1][0]
        return missed

    def _fold(self, cluster: ClusterState, missed: list[tuple[int, Change]]) -> None:
        """Bring the lives to the replica's version with the changes of the history."""
        changes = [change for _, change in missed]
        noted = (version for version, change in missed if concerns_owners(change))
        self._leases_changed_at = max(noted, default=self._leases_changed_at)
        self._folded = max(self._folded, cluster.version, *(version for version, _ in missed[-1:]))
        if not self._is_walking:
            self.lives = Lives(before_changes(cluster.snapshot(), changes).before, KEPT_LIVES)
            self._is_walking = True
        for change in changes:
            self._usage_history.advance(self.lives, change.at)
            life = self.lives.add(change)
            if isinstance(change, Granted) and life is not None:
                self._usage_history.note_wait(change.at, life.waited_s)
            for listener in self._listeners:
                listener(change, life)
