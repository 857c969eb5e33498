"""The replica: this process's copy of the state, brought up to date by the changes it lacks."""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.errors import StaleStateError
from resource_manager.storage import Store
from resource_manager.storage.base import FOLD_ERRORS, read_newest
from resource_manager.storage.outage import SharedReading


class Replica:
    """A copy of the state of `store`; used by one thread at a time, in a `with` block where it is changed.

    An empty store is read as a cluster without servers, and stays empty until something changes.
    """

    def __init__(self, store: Store) -> None:
        self.cluster: ClusterState | None = None
        self.is_stored = True
        self.refreshed_at = float("-inf")
        self._store = store
        self._sharing = SharedReading()

    def refresh(self) -> ClusterState:
        """Return the newest state."""
        cluster = read_newest(self._store, self.cluster if self.is_stored else None)
        self.is_stored = cluster is not None
        self.cluster = ClusterState() if cluster is None else cluster
        self.refreshed_at = time.monotonic()
        return self.cluster

    def require_stored(self) -> None:
        """Write a state without servers to an empty store, as commits need one.

        Raises `StaleStateError` then: what was decided before must be decided again on the stored state.
        """
        if not self.is_stored:
            self.initialise(ClusterState().snapshot())
            raise StaleStateError(0, None, "the store was empty; retry")

    def initialise(self, snapshot: Snapshot) -> bool:
        """Write that state to an empty store; return False if it is not empty.

        An earlier state may be lost, and with it the fencing tokens by which servers know its jobs: those of
        the new one are above all of them.
        """
        if self._store.is_lasting:
            token = max(snapshot.last_fencing_token, round(1000 * self._store.now()))
            snapshot = replace(snapshot, last_fencing_token=token)
        return self._store.initialise(snapshot)

    def as_of(self, asked_at: float, max_age_s: float = 0.0) -> ClusterState:
        """Return the state as of now, or of at most `max_age_s` ago, for a reader that asked at that time."""
        cluster = self.cluster
        if cluster is not None and time.monotonic() - self.refreshed_at < max_age_s:
            return cluster
        if self._sharing.is_due(asked_at) or cluster is None:
            with self._sharing.reading():
                return self.refresh()
        return cluster

    def catch_up(self, error: StaleStateError) -> None:
        """Bring the replica up to date, by the missed changes in the store's refusal if it has them."""
        if self.cluster is None or not error.missed:
            self.refresh()
            return
        try:
            self.cluster.apply(*error.missed)
        except FOLD_ERRORS:
            self.refresh()  # meets the same change, and reads the whole state

    def drop(self) -> None:
        """Drop the state: the next use reads it again."""
        self.cluster, self.is_stored = None, True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the state if this thread was stopped inside, perhaps in the middle of a change to it."""
        if kind is not None and not issubclass(kind, Exception):
            self.drop()
