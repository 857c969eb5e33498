"""A state in the memory of this process: for simulations, tests and a first try."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.team_ledger import NO_USES, Use
from resource_manager.errors import (
    KeysFullError,
    LockedError,
    RepeatedError,
    StaleStateError,
    StateClosedError,
    StateLostError,
)
from resource_manager.storage import refusals
from resource_manager.storage.base import NO_SUSPENSION, Store, Suspension, waits_for_owners
from resource_manager.storage.clock import ClockJump
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow, MemoryJobs
from resource_manager.storage.locks import Lock, ThreadLock, ThreadMutex
from resource_manager.storage.once import KEEP_S, MAX_KEYS, Once, References
from resource_manager.storage.reports import MemoryReports


def steady_clock() -> Callable[[], float]:
    """Return a clock that starts at the wall clock's time and then never jumps."""
    offset_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset_s


class MemoryStore(Store):
    """A store that keeps the last `history_limit` to twice as many changes, and the state before them.

    `clock` returns seconds; a simulation or a test passes its own.
    """

    is_lasting = False

    def __init__(self, *, clock: Callable[[], float] | None = None, history_limit: int = 10_000) -> None:
        self._clock = clock or steady_clock()
        self._history_limit = history_limit
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._order = ThreadMutex()
        self._base: ClusterState | None = None
        self._changes: list[Change] = []
        self.reports = MemoryReports(self._clock)
        self.jobs = MemoryJobs(self._clock)
        self.clock = None
        self._suspension = NO_SUSPENSION
        self._suspended_at = -math.inf
        self._once: dict[str, dict[str, tuple[float, str]]] = {}

    def now(self) -> float:
        return self._clock()

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        with self._mutex:
            base = self._base
            if base is None:
                if replica is not None:
                    raise StateLostError("the memory store is empty, but a state was read from it before")
                return None
            newest = base.version + len(self._changes)
            if replica is None or replica.version < base.version:
                replica = ClusterState.from_snapshot(base.snapshot())
            elif replica.version > newest:
                raise StateLostError(f"the memory store is at version {newest}, behind {replica.version}")
            missed = self._changes[replica.version - base.version :]
        replica.apply(*missed)
        return replica

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
        with self._mutex:
            stored = self._version()
            if stored != version:
                missed: tuple[Change, ...] = ()
                if self._base is not None and self._base.version <= version:
                    missed = tuple(self._changes[version - self._base.version :])
                raise StaleStateError(version, stored, missed=missed)
            self._refuse_closed()
            holder = self._order.holder
            if holder is not None and holder is not lock:
                raise LockedError(version)
            left_s = self._suspension.until - self._clock()
            if left_s > 0 and waits_for_owners(changes):
                raise refusals.unconfirmed(self._window_s, left_s, self._suspension.clock_jump_s)
            self._keep(once)
            self.jobs.write(jobs)
            self._changes += changes
            self._changed.notify_all()
            if len(self._changes) > 2 * self._history_limit:
                self._fold(len(self._changes) - self._history_limit)

    def initialise(self, snapshot: Snapshot) -> bool:
        with self._mutex:
            if self._base is not None:
                return False
            self._base = ClusterState.from_snapshot(snapshot)
            self.incarnation = new_incarnation(self._clock())
            return True

    def recall(self, once: Once) -> str | None:
        with self._mutex:
            stored = self._answer_to(once)
            if stored is None and len(self._once.get(once.caller, ())) >= MAX_KEYS:
                raise KeysFullError(MAX_KEYS)
        return None if stored is None else once.reference_in(stored)

    def replace(self, snapshot: Snapshot, *, lock: Lock | None = None, once: References = ()) -> None:
        with self._mutex:
            self._refuse_closed()
            self._keep(once)
            self.incarnation = new_incarnation(self._clock(), self.incarnation)
            if self._base is not None:
                self._fold(len(self._changes))
                snapshot = replace(
                    snapshot,
                    version=max(snapshot.version, self._base.version + 1),
                    last_fencing_token=max(snapshot.last_fencing_token, self._base.last_fencing_token),
                    sequence=max(snapshot.sequence, self._base.sequence),
                )
            self._base = ClusterState.from_snapshot(snapshot)

    def close_state(self, version: int, reason: str) -> None:
        with self._mutex:
            self._require(version)
            self.closed = reason

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
        with self._mutex:
            self._require(version)
            self._base, self._changes = ClusterState.from_snapshot(snapshot), []
            self.incarnation, self._suspension = incarnation, Suspension(suspended_until, 0.0)
            self.closed = ""

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        with self._mutex:
            if self._base is None:
                return []
            first = self._base.version + 1
            start = max(after + 1 - first, 0)
            return list(enumerate(self._changes[start : start + limit], first + start))

    @property
    def suspension(self) -> Suspension:
        return self._suspension if self._suspension.until > self._clock() else NO_SUSPENSION

    def suspend(self, jump: ClockJump) -> tuple[Suspension, bool]:
        with self._mutex:
            if jump.is_known(self._suspension.clock_jump_s, self._suspended_at):
                return self._suspension, self._suspension.clock_jump_s == jump.seconds
            self._suspended_at = self._clock()
            self._suspension = Suspension(self._suspended_at + self._window_s, jump.seconds)
            return self._suspension, True

    @property
    def _window_s(self) -> float:
        return (self._base or ClusterState()).settings.confirmation_window_s

    def lock(self, replica: ClusterState | None = None) -> Lock:
        return ThreadLock(self._order)

    def await_decision(self, lease_id: str, is_decided: Callable[[], bool], timeout_s: float) -> bool:
        with self._mutex:
            seen = self._version()
        if is_decided():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._version() != seen, timeout_s)

    def _require(self, version: int | None) -> None:
        stored = self._version()
        if stored != version:
            raise StaleStateError(version or 0, stored)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise StateClosedError("the memory store", self.closed)

    def _answer_to(self, once: Once) -> str | None:
        kept = self._once.get(once.caller, {})
        while kept and next(iter(kept.values()))[0] <= self._clock():
            del kept[next(iter(kept))]
        return kept[once.key][1] if once.key in kept else None

    def _keep(self, once: References) -> None:
        """Keep all keys, or raise `RepeatedError` and keep none."""
        for key, _ in once:
            if (stored := self._answer_to(key)) is not None:
                raise RepeatedError(key, stored)
        for key, reference in once:
            keys = self._once.setdefault(key.caller, {})
            keys[key.key] = (self._clock() + KEEP_S, key.stored(reference))

    def _version(self) -> int | None:
        return None if self._base is None else self._base.version + len(self._changes)

    def _fold(self, count: int) -> None:
        """Move the oldest changes from the history into the state before it."""
        assert self._base is not None
        self._base.apply(*self._changes[:count])
        del self._changes[:count]
