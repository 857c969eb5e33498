"""Learning of task runtimes from a store's history, on any store, at the cost of the new changes."""

from __future__ import annotations

import logging
import threading
import time

from resource_manager.cluster import ClusterState
from resource_manager.errors import ResourceManagerError
from resource_manager.runtime_history import RuntimeHistory
from resource_manager.stores import Store

logger = logging.getLogger(__name__)

LEARN_EVERY_S = 30.0
"""Maximum age of the learnt runtimes; a median of runs changes slowly."""

MAX_CHANGES = 10_000
"""Maximum of past changes to read, so that a long history does not delay a starting process."""

PAGE = 1000


class RuntimeLearner:
    """A `RuntimeHistory` kept up to date with a store; thread-safe."""

    def __init__(self, store: Store) -> None:
        self.runtimes = RuntimeHistory()
        self._store = store
        self._mutex = threading.Lock()
        self._version = -1
        self._looked_at = float("-inf")

    def catch_up(self, cluster: ClusterState) -> None:
        """Learn runtimes from the history up to that state, at most every `LEARN_EVERY_S`.

        Read nothing if all runtimes are stated. A history that cannot be read is logged, not raised.
        """
        if time.monotonic() - self._looked_at < LEARN_EVERY_S or not self._mutex.acquire(blocking=False):
            return
        try:
            if self._version < cluster.version and _somebody_says_nothing(cluster):
                self._read(cluster)
            self._looked_at = time.monotonic()
        except ResourceManagerError as error:
            self._looked_at = time.monotonic()
            logger.warning("no runtimes were learnt: %s", error)
        finally:
            self._mutex.release()

    def _read(self, cluster: ClusterState) -> None:
        after = max(self._version, cluster.version - MAX_CHANGES, 0)
        while after < cluster.version:
            page = self._store.history(after, PAGE)
            for version, change in page:
                if version <= cluster.version:
                    self.runtimes.add(change)
            after = page[-1][0] if page else cluster.version
        self._version = cluster.version
        if self.runtimes.live_count != len(cluster.leases):  # some began before these changes or a reset
            self.runtimes.take_over(cluster.leases.values())


def _somebody_says_nothing(cluster: ClusterState) -> bool:
    """Return whether a lease or a pending request states no runtime."""
    return any(lease.request.expected_runtime_s is None for lease in cluster.leases.values()) or any(
        entry.request.expected_runtime_s is None for entry in cluster.waiting.values()
    )
