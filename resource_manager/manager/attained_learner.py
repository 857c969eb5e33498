"""Service that jobs attained, from a store's history, on any store, at the cost of the new changes."""

from __future__ import annotations

import logging
import threading
import time

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.errors import ResourceManagerError
from resource_manager.scheduling.attained_service import AttainedService
from resource_manager.storage import Store

logger = logging.getLogger(__name__)

LEARN_EVERY_S = 30.0
"""Maximum age of what is known; attained service changes slowly."""

MAX_CHANGES = 10_000
"""Maximum of past changes to read, so that a long history does not delay a starting process."""

AT_FIRST = 1000
"""The newest changes, all that the first look reads: a command looks once, and somebody waits for it."""

PAGE = 1000


class AttainedLearner:
    """An `AttainedService` kept up to date with a store; thread-safe."""

    def __init__(self, store: Store) -> None:
        self.attained = AttainedService()
        self._store = store
        self._mutex = threading.Lock()
        self._version = -1
        self._more_is_there = False
        self._checked_at = float("-inf")

    def attained_gpu_s(self, request: Request) -> float:
        """Return the GPU seconds that earlier leases of the request's job took, as far as was learnt."""
        return self.attained.attained_gpu_s(request)

    def catch_up(self, cluster: ClusterState) -> None:
        """Read the history up to that state, at most every `LEARN_EVERY_S`.

        A history that cannot be read is logged, not raised.
        """
        if time.monotonic() - self._checked_at < LEARN_EVERY_S or not self._mutex.acquire(blocking=False):
            return
        try:
            if self._version < cluster.version or self._more_is_there:
                self._read(cluster)
            self._checked_at = time.monotonic()
        except ResourceManagerError as error:
            self._checked_at = time.monotonic()
            logger.warning("it is not known what jobs attained: %s", error)
        finally:
            self._mutex.release()

    def _read(self, cluster: ClusterState) -> None:
        attained, after = self.attained, max(self._version, cluster.version - MAX_CHANGES, 0)
        is_first = self._version < 0
        if is_first:
            after = max(cluster.version - AT_FIRST, 0)
        elif self._more_is_there:  # a fold goes forward only: it begins again, further back
            attained, after = AttainedService(), max(cluster.version - MAX_CHANGES, 0)
        self._more_is_there = is_first and after > 0
        while after < cluster.version:
            page = self._store.history(after, PAGE)
            for version, change in page:
                if version <= cluster.version:
                    attained.add(change)
            after = page[-1][0] if page else cluster.version
        self._version = cluster.version
        if attained.live_count != len(cluster.leases):  # some began before what was read, or a reset
            attained.take_over(cluster.leases.values())
        self.attained = attained
