"""The state in one Airflow Variable, written under a lock in Redis.

Every write happens under a lock renewed just before, after the stored version was read again. A process
that reaches Airflow's database also compares there, in the transaction that writes. A task reaches only the
execution API, which cannot compare and set. One case is therefore not detected: a write that arrives after
the lock expired, because its task slept, died or lost Redis in between. For more than a small team, or where
that matters, a redis:// store is the better choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from resource_manager import errors
from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.team_ledger import NO_USES, Use
from resource_manager.storage import refusals
from resource_manager.storage.airflow_variable import DEFAULT_LOCK, DEFAULT_VARIABLE, document
from resource_manager.storage.airflow_variable.access import VariableAccess
from resource_manager.storage.airflow_variable.document import Document
from resource_manager.storage.airflow_variable.jobs import VariableJobs
from resource_manager.storage.base import NO_SUSPENSION, Store, Suspension, waits_for_owners
from resource_manager.storage.clock import CLOCK_TOLERANCE_S, ClockJump, ServerClock
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.lineage import Lineage
from resource_manager.storage.locks import Lock
from resource_manager.storage.once import KEEP_S, Once, References
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.storage.reports import RedisReports

LOCK_TTL_S = 30.0
WRITE_MARGIN_S = 10.0
"""No write begins within this last part of the lock's time to live."""

CHANGES_KEPT = 100
KEYS_KEPT = 1000
WAY_OUT = "restore the newest document, or check which jobs still run and start over with a reset"


class VariableStore(Store):
    """A store that keeps the last 100 changes in the document; thread-safe.

    Redis provides lock and clock, and keeps the last version: a Variable that is older than that, or gone,
    is a `StateLostError` and not an empty store.
    """

    is_lasting = True
    suspension = NO_SUSPENSION
    clock: ServerClock

    def __init__(
        self,
        access: VariableAccess,
        client: RedisClient,
        *,
        variable: str = DEFAULT_VARIABLE,
        lock: str = DEFAULT_LOCK,
    ) -> None:
        self._access = access
        self._client = client
        self._variable = variable
        self._lock = f"{lock}:{variable}"
        self._where = f"Airflow Variable {variable!r}"
        self._version_high_water = client.key(f"variable:{variable}:version")
        self.clock = ServerClock(client.time)
        self._last_commit = ""
        self._lineage = Lineage()
        self.reports = RedisReports(client)
        self.jobs = VariableJobs(access, variable, self.now)

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        stored = self._read(self._text(), -1 if replica is None else replica.version)
        if stored is None:
            return None
        self.closed = stored.closed
        until, clock_jump_s, _ = stored.suspended
        self.suspension = Suspension(until, clock_jump_s) if until > self.now() else NO_SUSPENSION
        found = stored.cluster.version
        if replica is not None and replica.version > found:
            raise errors.StateLostError(
                f"{self._where} is at version {found}, but version {replica.version} was read before; "
                + WAY_OUT
            )
        if replica is not None and replica.version == found and stored.commit == self._last_commit:
            return replica
        self.incarnation, self._last_commit = stored.incarnation, stored.commit
        return stored.cluster

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
        with self._holding(version, lock) as (held, text):
            stored = self._read(text, version)
            if stored is None:
                raise errors.StaleStateError(
                    version, None, f"{self._where} does not exist; write the first state"
                )
            cluster = stored.cluster
            remembered = self._remembered_version()
            if remembered is not None and remembered > cluster.version:
                raise errors.StateLostError(
                    f"{self._where} is at version {cluster.version}, but version {remembered} was written "
                    f"before; {WAY_OUT}"
                )
            if cluster.version != version:
                raise errors.StaleStateError(version, cluster.version, missed=stored.missed_since(version))
            self._refuse_closed(stored)
            # The clock is read again: the estimate behind `now` may itself be wrong.
            asked_at = self.clock.steady()
            self.clock.learn(self._client.time(), asked_at)
            if abs(now - self.now()) > CLOCK_TOLERANCE_S:
                raise errors.StaleStateError(
                    version, version, f"decided more than {CLOCK_TOLERANCE_S:g} s off the clock; retry"
                )
            until, clock_jump_s, _ = stored.suspended
            left_s = until - self.now()
            if left_s > 0 and waits_for_owners(changes):
                window_s = cluster.settings.confirmation_window_s
                raise refusals.unconfirmed(window_s, left_s, clock_jump_s)
            kept = self._keep(stored, once)
            cluster.apply(*changes)
            numbered = (*stored.changes, *enumerate(changes, version + 1))
            incarnation = stored.incarnation or new_incarnation(self.now())
            new = replace(stored, incarnation=incarnation, changes=numbered, once=kept)
            self.jobs.write(jobs)  # before: one whose request is not written is dropped when its time is over
            self._write(new, held, text)

    def initialise(self, snapshot: Snapshot) -> bool:
        with self._holding(snapshot.version, None, patient=True) as (lock, text):
            if self._read(text) is not None:
                return False
            first = Document(ClusterState.from_snapshot(snapshot), new_incarnation(self.now()))
            self._write(first, lock, None)
            return True

    def recall(self, once: Once) -> str | None:
        stored = self._read(self._text())
        text = None if stored is None else self._answer_to(stored, once)
        if stored is not None and text is None and len(self._live(stored)) >= KEYS_KEPT:
            raise errors.KeysFullError(KEYS_KEPT)
        return None if text is None else once.reference_in(text)

    def replace(self, snapshot: Snapshot, *, lock: Lock | None = None, once: References = ()) -> None:
        with self._holding(snapshot.version, lock, patient=True) as (held, text):
            stored = Document(ClusterState(), incarnation="")
            try:
                if text is not None:
                    stored = document.from_json(text, self._where)
            except errors.NewerFormatError:
                raise
            except errors.CorruptStateError:
                pass
            self._refuse_closed(stored)
            # The earlier state may have reached any number: the time in ms is above all of them.
            beyond = round(self.now() * 1000)
            before = stored.cluster
            cluster = ClusterState.from_snapshot(
                replace(
                    snapshot,
                    version=max(snapshot.version, before.version + 1, beyond),
                    last_fencing_token=max(snapshot.last_fencing_token, before.last_fencing_token, beyond),
                    sequence=max(snapshot.sequence, before.sequence),
                )
            )
            kept = self._keep(stored, once)
            incarnation = new_incarnation(self.now(), stored.incarnation)
            new = Document(cluster, incarnation, operator_reset=True, changes=stored.changes, once=kept)
            self._write(new, held, text)

    def close_state(self, version: int, reason: str) -> None:
        with self._holding(version, None, patient=True) as (lock, text):
            stored = self._read(text)
            if stored is None or stored.cluster.version != version:
                raise errors.StaleStateError(version, None if stored is None else stored.cluster.version)
            self._write(replace(stored, closed=reason), lock, text)

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
        with self._holding(snapshot.version, lock, patient=True) as (held, text):
            stored = None if text is None else document.from_json(text, self._where)
            found = None if stored is None else stored.cluster.version
            if found != version:
                raise errors.StaleStateError(version or 0, found)
            before = () if stored is None else stored.changes
            new = Document(
                ClusterState.from_snapshot(snapshot),
                incarnation,
                operator_reset=True,
                changes=tuple(entry for entry in before if entry[0] <= history_until),
                once=() if stored is None else stored.once,
                suspended=(suspended_until, 0.0, self.now()),
            )
            self._write(new, held, text)

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        stored = self._read(self._text())
        if stored is None:
            return []
        return [(version, change) for version, change in stored.changes if version > after][:limit]

    def suspend(self, jump: ClockJump) -> tuple[Suspension, bool]:
        with self._holding(0, None, patient=True) as (lock, text):
            stored = self._read(text)
            if stored is None:
                raise errors.StaleStateError(0, None, f"{self._where} does not exist; write the first state")
            until, clock_jump_s, at = stored.suspended
            if is_new := not jump.is_known(clock_jump_s, at):
                now = self.now()
                until = now + stored.cluster.settings.confirmation_window_s
                self._write(replace(stored, suspended=(until, jump.seconds, now)), lock, text)
            self.suspension = Suspension(until, jump.seconds)
            return self.suspension, is_new or clock_jump_s == jump.seconds

    def lock(self, replica: ClusterState | None = None) -> Lock:
        return RedisLock(self._client, self._lock, life_s=LOCK_TTL_S)

    def close(self) -> None:
        self._client.close()

    def _text(self) -> str | None:
        return self._access.get(self._variable)

    def _read(self, text: str | None, version: int = -1) -> Document | None:
        """Return the document, None if there was none yet; `version` is that of a replica, if any."""
        if text is None:
            remembered = self._remembered_version()
            if self.incarnation or remembered is not None:
                raise errors.StateLostError(
                    f"{self._where} is gone (deleted, or Airflow's database is down), though version "
                    f"{remembered} was written; {WAY_OUT}"
                )
            return None
        stored = document.from_json(text, self._where)
        if self.incarnation and stored.incarnation != self.incarnation and not stored.operator_reset:
            raise errors.StateReplacedError(
                f"{self._where} holds another state than before, started without a reset; restore the newest "
                f"document, or {refusals.START_AGAIN}"
            )
        known_id, stored_id = self._lineage.id_of(stored.incarnation, version), stored.id_of(version)
        if known_id and stored_id and known_id != stored_id:
            raise errors.StateLostError(
                f"{self._where} lacks the version {version} that was read before; {WAY_OUT}"
            )
        self._note(stored)
        return stored

    def _note(self, stored: Document) -> None:
        version = stored.cluster.version
        self._lineage.note(stored.incarnation, version, stored.id_of(version))

    def _refuse_closed(self, stored: Document) -> None:
        if stored.closed:
            raise errors.StateClosedError(self._where, stored.closed)

    def _answer_to(self, stored: Document, once: Once) -> str | None:
        for caller, key, text, until in reversed(stored.once):
            if (caller, key) == (once.caller, once.key) and until > self.now():
                return text
        return None

    def _keep(self, stored: Document, once: References) -> tuple[tuple[str, str, str, float], ...]:
        """Return the idempotency keys of the document and these; raises `RepeatedError`."""
        for key, _ in once:
            if (text := self._answer_to(stored, key)) is not None:
                raise errors.RepeatedError(key, text)
        until = self.now() + KEEP_S
        added = tuple((key.caller, key.key, key.stored(reference), until) for key, reference in once)
        return (*self._live(stored), *added)

    def _live(self, stored: Document) -> tuple[tuple[str, str, str, float], ...]:
        return tuple(key for key in stored.once if key[3] > self.now())

    def _remembered_version(self) -> int | None:
        with self._client.reporting():
            remembered = self._client.driver.get(self._version_high_water)
        return None if remembered is None else int(remembered)

    def _write(self, new: Document, lock: RedisLock, before: str | None) -> None:
        """Write the document in place of the text `before`, which the caller has checked."""
        new = replace(new, commit=os.urandom(8).hex(), changes=new.changes[-CHANGES_KEPT:])
        text = document.to_json(new, self.now())
        if lock.remaining_s < WRITE_MARGIN_S:
            raise errors.LockError(
                f"{self._where} was not written: the lock had only {lock.remaining_s:.1f} s left"
            )
        try:
            written = self._access.set(self._variable, text, before)
        except errors.StoreUnavailableError:
            # A write without an answer may still arrive: no other client writes until this lock expires.
            lock.let_expire()
            raise
        if not written:
            raise errors.LockError(
                f"{self._where} was not written: another client changed it, so the lock was lost"
            )
        self.incarnation, self._last_commit = new.incarnation, new.commit
        self._note(new)
        self._client.put((self._version_high_water, new.cluster.version, None))

    @contextmanager
    def _holding(
        self, version: int, lock: Lock | None, *, patient: bool = False
    ) -> Iterator[tuple[RedisLock, str | None]]:
        """Yield the caller's lock, or one for this step, which is renewed, and the text as of then."""
        held = self._acquire(version, patient) if lock is None else lock
        assert isinstance(held, RedisLock)
        try:
            held.renew()
            yield held, self._text()
        except errors.LockError as error:
            raise errors.StaleStateError(version, None, str(error)) from error
        finally:
            if lock is None:
                # The write stands, and an error inside matters more than a lost lock.
                with suppress(errors.LockError, errors.StoreUnavailableError):
                    held.release()

    def _acquire(self, version: int, patient: bool) -> RedisLock:
        lock = RedisLock(self._client, self._lock, life_s=LOCK_TTL_S)
        if not lock.acquire(2 * LOCK_TTL_S if patient else 0.0):
            if patient:
                raise errors.LockTimeoutError(2 * LOCK_TTL_S)
            raise errors.LockedError(version)
        return lock
