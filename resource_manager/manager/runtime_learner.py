"""Learning of task runtimes from a store's history, on any store, at the cost of the new changes."""

from __future__ import annotations

import logging
import threading
import time

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.errors import ResourceManagerError
from resource_manager.scheduling.runtime_history import Runtime, RuntimeHistory
from resource_manager.storage import Store

logger = logging.getLogger(__name__)

LEARN_EVERY_S = 30.0
"""Maximum age of the learnt runtimes; a median of runs changes slowly."""

MAX_CHANGES = 10_000
"""Maximum of past changes to read, so that a long history does not delay a starting process."""

AT_FIRST = 1000
"""The newest changes, all that the first look reads: a command looks once, and somebody waits for it."""

PAGE = 1000


class RuntimeLearner:
    """A `RuntimeHistory` kept up to date with a store; thread-safe."""

    def __init__(self, store: Store) -> None:
        self.runtimes = RuntimeHistory()
        self._store = store
        self._mutex = threading.Lock()
        self._version = -1
        self._more_is_there = False
        self._checked_at = float("-inf")

    def runtime_of(self, request: Request) -> Runtime | None:
        """How long the request should run, by what was learnt; None if nobody knows."""
        return self.runtimes.runtime_of(request)

    def attained_gpu_s(self, request: Request) -> float:
        """Return the GPU seconds that earlier leases of the request's job took, as far as was learnt."""
        return self.runtimes.attained_gpu_s(request)

    def catch_up(self, cluster: ClusterState, *, always: bool = False) -> None:
        """Learn runtimes from the history up to that state, at most every `LEARN_EVERY_S`.

        Without `always` nothing is read while all runtimes are stated. A history that cannot be read is
        logged, not raised.
        """
        if time.monotonic() - self._checked_at < LEARN_EVERY_S or not self._mutex.acquire(blocking=False):
            return
        try:
            is_behind = self._version < cluster.version or self._more_is_there
            if is_behind and (always or _has_unstated_runtimes(cluster)):
                self._read(cluster)
            self._checked_at = time.monotonic()
        except ResourceManagerError as error:
            self._checked_at = time.monotonic()
            logger.warning("no runtimes were learnt: %s", error)
        finally:
            self._mutex.release()

    def _read(self, cluster: ClusterState) -> None:
        runtimes, after = self.runtimes, max(self._version, cluster.version - MAX_CHANGES, 0)
        is_first = self._version < 0
        if is_first:
            after = max(cluster.version - AT_FIRST, 0)
        elif self._more_is_there:  # a fold goes forward only: it begins again, further back
            runtimes, after = RuntimeHistory(), max(cluster.version - MAX_CHANGES, 0)
        self._more_is_there = is_first and after > 0
        while after < cluster.version:
            page = self._store.history(after, PAGE)
            for version, change in page:
                if version <= cluster.version:
                    runtimes.add(change)
            after = page[-1][0] if page else cluster.version
        self._version = cluster.version
        if runtimes.live_count != len(cluster.leases):  # some began before what was read, or a reset
            runtimes.take_over(cluster.leases.values())
        self.runtimes = runtimes


def _has_unstated_runtimes(cluster: ClusterState) -> bool:
    """Return whether a lease or a pending request states no runtime."""
    return any(lease.request.expected_runtime_s is None for lease in cluster.leases.values()) or any(
        entry.request.expected_runtime_s is None for entry in cluster.pending.values()
    )
