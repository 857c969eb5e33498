"""The interface of a store: the newest state, atomic commits on a version, and one clock."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from resource_manager.core.changes import Change, Expired, Granted, Quarantined
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Lease
from resource_manager.core.team_ledger import NO_USES, Use
from resource_manager.errors import CapacityError, LeaseNotFoundError, UnknownNodeError
from resource_manager.storage.clock import ClockJump, ServerClock
from resource_manager.storage.jobs import JobRow, JobStore
from resource_manager.storage.locks import Lock
from resource_manager.storage.once import Once, References
from resource_manager.storage.reports import ReportStore

logger = logging.getLogger(__name__)

FOLD_ERRORS = (CapacityError, LeaseNotFoundError, UnknownNodeError, LookupError)
"""What a state raises that cannot take a change: it is another one than that change was decided on."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """Time in which nothing is granted and nothing expires, so that owners can renew their leases.

    It ends at `until` by the store's clock. A jump of that clock by `clock_jump_s` began it, or where that is
    0 a restart or fail-over.
    """

    until: float = -math.inf
    clock_jump_s: float = 0.0


NO_SUSPENSION = Suspension()

POLL_S = 0.5
"""Pause of a waiter that its store cannot wake."""


class Store(Protocol):
    """One state: a version, the result of all changes, and their bounded history; thread-safe.

    Every method may raise `StoreUnavailableError`; those that read state may raise `CorruptStateError`,
    and `StateLostError` when the stored state is older than one read from it before, or was and went on.
    """

    is_lasting: bool
    """Whether the state outlives its processes, and jobs on servers may be those of an earlier one."""
    incarnation: str = ""
    """The name of the state as last read or written, empty before: see `new_incarnation`."""
    closed: str = ""
    """The reason for which the state was closed when it was last read as a whole; empty if it is open."""
    reports: ReportStore
    """The last reports of servers and sightings of the clock, kept beside the state."""
    jobs: JobStore
    """The jobs of requests and their results, kept beside the state."""
    clock: ServerClock | None
    """The estimate of the store's clock; None if that is this process's own."""

    def now(self) -> float:
        """Return the seconds since the epoch on the store's clock, which all its users share."""
        assert self.clock is not None
        return self.clock.now()

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        """Return the newest state: `replica` brought up to date where that is cheaper, else a new one.

        Return None if the store holds no state yet. The replica must contain committed changes only.
        """

    def refresh_known(self) -> ClusterState:
        """Return the newest state without what a newer version of this software wrote and this one skips.

        It is for changes to one lease alone. Raises `NewerFormatError` where that cannot be left out.
        """
        return self.refresh(None) or ClusterState()

    def commit(
        self,
        version: int,
        changes: Sequence[Change],
        *,
        now: float,
        lock: Lock | None = None,
        once: References = (),
        uses: Mapping[str, Use] = NO_USES,
        jobs: Sequence[JobRow] = (),
    ) -> None:
        """Write all changes or none; the new version is `version + len(changes)`.

        `uses` is the decayed use of teams after the changes, where these change it: for a store that cannot
        fold it from them. `once` are idempotency keys that are kept with the changes, each with a reference
        to what they did; `RepeatedError` if one is known already. `jobs` are stored beside the state, at most
        one row a name.

        Raises `StaleStateError` unless the stored version is `version`, the lock is free or held by
        `lock`, and `now`, the time of the decision, is close to the store's clock. After that error,
        refresh, decide again and retry. The caller applies the changes to its own replica. The commit may
        release `lock`, too.
        """

    def tidy_up(self, replica: ClusterState) -> None:
        """Shorten what is kept, where commits do not; called after them, with the state that they led to."""
        return

    def initialise(self, snapshot: Snapshot) -> bool:
        """Write the first state; return False, changing nothing, if there is one."""

    def recall(self, once: Once) -> str | None:
        """Return the reference kept with that idempotency key; raises `IdempotencyKeyError`.

        Raises `KeysFullError` for a new key of a caller who has `MAX_KEYS`.
        """

    def replace(self, snapshot: Snapshot, *, lock: Lock | None = None, once: References = ()) -> None:
        """Replace any stored state by `snapshot`; version, fencing token and sequence keep growing.

        `lock` is what the caller holds, if anything; `once` is as in `commit`.
        """

    def close_state(self, version: int, reason: str) -> None:
        """Refuse every later commit with `StateClosedError`, which says the reason; only `restore` goes on.

        Raises `StaleStateError` unless the stored version is `version`.
        """

    def restore(
        self,
        snapshot: Snapshot,
        version: int | None,
        *,
        incarnation: str,
        suspended_until: float,
        history_until: int,
        lock: Lock | None = None,
    ) -> None:
        """Replace the state of that version, None if there is none, by `snapshot`, as that incarnation.

        All clients take it over. Nothing is granted before `suspended_until`; changes above version
        `history_until` leave the history. `lock` is what the caller holds, if anything. Raises
        `StaleStateError` if the stored version is another one.
        """

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        """Return up to `limit` kept changes above version `after`, each with the version it led to."""

    @property
    def suspension(self) -> Suspension:
        """The recovery window as last read; `NO_SUSPENSION` if there is none."""

    def suspend(self, jump: ClockJump) -> tuple[Suspension, bool]:
        """Begin a recovery window because of that jump, unless that was done before.

        Return the window, which may be over, and whether it was begun by this very jump: now, or by an
        earlier try whose answer was lost. No two processes see one jump to the same fraction of a second.
        In the window commits that grant, or expire leases, raise `StateUnconfirmedError`.
        """

    def lock(self, replica: ClusterState | None = None) -> Lock:
        """Return a new claim on the lock that orders commits; while held, only its holder can commit.

        A store that can brings the replica up to date while the lock is acquired; see `Lock.is_fresh`.
        """

    def await_decision(self, lease_id: str, is_decided: Callable[[], bool], timeout_s: float) -> Lease | bool:
        """Sleep until the pending request may have been granted or cancelled; return False after `timeout_s`.

        A store that tells of a grant returns its lease, so that the waiter need not read the state.
        `is_decided` is asked once a decision from now on would be noticed: if it is true, return at once. One
        process that waits for a request is woken; a second one may learn of it by its timeout.
        """
        deadline = time.monotonic() + timeout_s
        while not is_decided():
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(left_s, POLL_S))
        return True

    def close(self) -> None:
        """Close the connections; the store is not used afterwards."""
        return


def read_newest(store: Store, replica: ClusterState | None) -> ClusterState | None:
    """Return the newest state as `Store.refresh` does, a new one where the replica cannot take what it lacks.

    Such a replica would fail again at every later refresh.
    """
    try:
        return store.refresh(replica)
    except FOLD_ERRORS as error:
        if replica is None:
            raise
        logger.warning("the state is read as a whole, since a change does not fit this copy of it: %s", error)
        return store.refresh(None)


def waits_for_owners(changes: Sequence[Change]) -> bool:
    """Return whether changes are refused in a recovery window: they grant, or end what was not renewed."""
    return any(
        not change.revoked if isinstance(change, Quarantined) else isinstance(change, Granted | Expired)
        for change in changes
    )
