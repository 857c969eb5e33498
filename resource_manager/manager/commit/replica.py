"""The replica: this process's copy of the state, brought up to date by the changes it lacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.errors import StaleStateError
from resource_manager.storage import Store


class Replica:
    """A copy of the state of `store`; used by one thread at a time, in a `with` block where it is changed.

    `first_state` is written if the store holds no state.
    """

    def __init__(self, store: Store, first_state: Callable[[], Snapshot]) -> None:
        self.cluster: ClusterState | None = None
        self.refreshed_at = float("-inf")
        self._store = store
        self._first_state = first_state

    def refresh(self) -> ClusterState:
        """Return the newest state."""
        cluster = self._store.refresh(self.cluster)
        if cluster is None:
            self._store.initialise(self._first_state())
            cluster = self._store.refresh(None)
            if cluster is None:
                raise StaleStateError(0, None, "the state vanished while it was being initialised; retry")
        self.cluster = cluster
        self.refreshed_at = time.monotonic()
        return cluster

    def as_of(self, max_age_s: float) -> ClusterState:
        """Return the state as of now, or of at most `max_age_s` ago."""
        if self.cluster is None or time.monotonic() - self.refreshed_at >= max_age_s:
            return self.refresh()
        return self.cluster

    def catch_up(self, error: StaleStateError) -> None:
        """Bring the replica up to date, by the missed changes in the store's refusal if it has them."""
        if self.cluster is None or not error.missed:
            self.refresh()
            return
        for change in error.missed:
            self.cluster.apply(change)

    def drop(self) -> None:
        """Drop the state: the next use reads it again."""
        self.cluster = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the state if this thread was stopped inside, perhaps in the middle of a change to it."""
        if kind is not None and not issubclass(kind, Exception):
            self.drop()
