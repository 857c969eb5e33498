"""What a manager asks of a store: the newest state, atomic commits on a version, and one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from resource_manager.cluster import ClusterState, Snapshot
from resource_manager.locks import Lock
from resource_manager.models import Change


class Store(Protocol):
    """Keeps one state as a version, a fold of changes and their bounded history; safe to share by threads.

    Every method may raise `StoreUnavailableError`; those that read state may raise `CorruptStateError`,
    and `StateLostError` when the stored state is older than one that was read from it before.
    """

    def now(self) -> float:
        """Seconds since the epoch on the store's clock, which all its users share."""

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        """The newest state: `replica` brought up to date where that is cheaper, else a new one.

        None when the store holds no state yet. The replica must hold nothing but committed changes.
        """

    def commit(
        self, version: int, changes: Sequence[Change], *, now: float, lock_token: str | None = None
    ) -> None:
        """Writes all changes, or none; the new version is `version + len(changes)`.

        Raises `StaleStateError` unless the stored version is `version`, the lock is free or held under
        `lock_token`, and `now`, at which the changes were decided, is close to the store's clock: refresh,
        decide anew and try again. The caller applies the changes to its own replica.
        """

    def initialise(self, snapshot: Snapshot) -> bool:
        """Writes the first state if there is none; False, changing nothing, if there is one."""

    def replace(self, snapshot: Snapshot, *, lock_token: str | None = None) -> None:
        """Starts over from `snapshot`, whatever is stored; version, fencing and sequence grow on.

        `lock_token` names the lock under which this is done, if one is held.
        """

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        """Up to `limit` changes that are still kept, each with the version it led to, above `after`."""

    @property
    def suspended_until(self) -> float:
        """The end of the recovery window as last heard, by the store's clock; -inf if there is none."""

    def lock(self) -> Lock:
        """A new claim on the lock that gives order to commits; while one holds, only it can commit."""

    def close(self) -> None:
        """Gives back connections; the store is not used afterwards."""
