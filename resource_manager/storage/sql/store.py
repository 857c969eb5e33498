"""The state in a database: each commit compares and sets the version of one row, in one transaction.

A whole state is a snapshot with the changes after it, all as the codec's JSON. The client whose commit passes
a multiple of `SNAPSHOT_EVERY` versions writes its replica as the next snapshot and drops the oldest changes.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_values
from typing import Any, NamedTuple

from resource_manager import STORED_FORMAT
from resource_manager.core.changes import Change, Granted, Queued
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.team_ledger import NO_USES, Use
from resource_manager.errors import (
    CapacityError,
    CorruptStateError,
    KeysFullError,
    LeaseNotFoundError,
    LockedError,
    NewerFormatError,
    RepeatedError,
    StaleStateError,
    StateClosedError,
    StateLostError,
    StoreError,
)
from resource_manager.storage import refusals
from resource_manager.storage.base import NO_SUSPENSION, Suspension, poll, waits_for_owners
from resource_manager.storage.clock import CLOCK_TOLERANCE_S, ClockJump, ServerClock
from resource_manager.storage.codec import (
    change_from_json,
    change_to_json,
    check_format,
    is_known,
    skipping,
)
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.locks import Lock
from resource_manager.storage.once import KEEP_S, MAX_KEYS, Once, digest
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import NO_LOCK, Commit, Connection
from resource_manager.storage.sql.jobs import SqlJobs
from resource_manager.storage.sql.lock import SqlLock, heir_in, make_room
from resource_manager.storage.sql.reports import SqlReports
from resource_manager.storage.sql.snapshots import SNAPSHOT_EVERY, Snapshots
from resource_manager.storage.sql.tables import MAX_REASON
from resource_manager.storage.sql.witnesses import SqlWitnesses

logger = logging.getLogger(__name__)

MAX_CATCH_UP = 2 * SNAPSHOT_EVERY
"""Changes that a replica lacks beyond which the whole state is read instead."""

MAX_MISSED = 64
"""Changes that a refused commit brings along."""

JUMP = 2**20
"""Distance by which version and fencing token jump after a fail-over, beyond all that may have been lost."""

SEQUENCE_JUMP = 8192
"""The same for the number in the order of arrival: short, since short ids are used up by it."""

COUNT_KEYS_S = 60.0
"""Time between two counts of the idempotency keys of one caller."""


class StateRow(NamedTuple):
    """The row of `state`, whether the server still is the one that wrote it, and the time there."""

    format: int
    incarnation: str
    version: int | None
    last_fencing_token: int
    sequence: int
    server: str
    this_server: str
    suspended_until: float
    clock_jump_s: float
    clock_jump_at: float
    operator_reset: bool
    closed: str
    lock_token: str
    lock_expires_at: float
    now: float


class StoredChange(NamedTuple):
    """A row of `change`."""

    version: int
    body: str
    commit_id: str


_COLUMNS = (
    "s.format, s.incarnation, s.version, s.last_fencing_token, s.sequence, s.server, {server}, "
    "s.suspended_until, s.clock_jump_s, s.clock_jump_at, s.operator_reset, s.closed, s.lock_token, "
    "s.lock_expires_at, {now}"
)
_STATE = f"SELECT {_COLUMNS} FROM {{state}} s WHERE s.namespace = :namespace"
_STATE_AND_CHANGES = (
    f"SELECT {_COLUMNS}, c.version, c.body, c.commit_id FROM {{state}} s LEFT JOIN ("
    "SELECT version, body, commit_id FROM {change} WHERE namespace = :namespace AND version > :after "
    "ORDER BY version LIMIT :limit) c ON 1 = 1 WHERE s.namespace = :namespace ORDER BY c.version"
)
_CHANGES = (
    "SELECT version, body FROM {change} WHERE namespace = :namespace AND version > :after "
    "ORDER BY version LIMIT :limit"
)


class SqlStore:
    """A store that keeps about the last `history_length` changes; thread-safe.

    After a fail-over of PostgreSQL the last commits may be lost. The store detects that the server is on
    another timeline than the one that wrote the state. For `confirmation_window_s` of the cluster's settings,
    the recovery window, it refuses commits that grant or expire.
    """

    def __init__(
        self,
        database: Database,
        *,
        history_length: int = 100_000,
    ) -> None:
        self.database = database
        self._snapshots = Snapshots(database, history_length)
        self._full: dict[str, tuple[float, bool]] = {}
        self._confirmation_window_s = ClusterSettings().confirmation_window_s
        self._incarnation = ""
        self._clock = ServerClock(database.time)
        self._suspension = NO_SUSPENSION
        self._closed = ""
        self._is_untidy = False

    def now(self) -> float:
        return self._clock.now()

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        row, changes = self._state() if replica is None else self._state_after(replica.version, MAX_CATCH_UP)
        if row is None:
            return None
        assert row.version is not None
        try:
            if replica is not None:
                if replica.version > row.version:
                    raise self._lost(replica.version, row.version)
                if replica.version + len(changes) == row.version:
                    for change in _changes(changes):
                        replica.apply(change)
                    self._confirmation_window_s = replica.settings.confirmation_window_s
                    return replica
            replica = self._whole_state()
            self._confirmation_window_s = replica.settings.confirmation_window_s
            return replica
        except CorruptStateError as error:
            raise refusals.unreadable(self.database.address, error) from error

    def refresh_known(self) -> ClusterState:
        self._state()  # a recovery window is not begun below, as that writes a whole state
        try:
            with skipping():
                while True:
                    cluster = self._known_state()
                    if cluster is not None:
                        return cluster
        except CorruptStateError as error:
            raise refusals.unreadable(self.database.address, error) from error
        except (CapacityError, LeaseNotFoundError, LookupError) as error:  # of what the skipped had led to
            raise NewerFormatError(
                f"{self.database.address}: a newer version wrote what later changes build on: upgrade it"
            ) from error

    def commit(
        self,
        version: int,
        changes: Sequence[Change],
        *,
        now: float,
        lock: Lock | None = None,
        once: Sequence[tuple[Once, str]] = (),
        uses: Mapping[str, Use] = NO_USES,
        jobs: Sequence[JobRow] = (),
    ) -> None:
        leases = [change.lease for change in changes if isinstance(change, Granted)]
        arrived = [change.sequence for change in changes if isinstance(change, Queued)]
        arrived += [lease.sequence for lease in leases]
        # The id distinguishes a commit sent again, after its answer was lost, from another client's.
        commit = Commit(
            namespace=self.database.namespace,
            version=version,
            commit_id=_name(),
            changes=[(change.at, change_to_json(change)) for change in changes],
            decided_at=now,
            lock_token=NO_LOCK if lock is None else lock.token,
            incarnation=self._incarnation,
            fencing_token=max((lease.fencing_token for lease in leases), default=None),
            sequence=max(arrived, default=None),
            waits_for_owners=waits_for_owners(changes),
            once=[(key.caller, key.key, key.stored(reference)) for key, reference in once],
            jobs=[row._replace(caller=digest(row.caller)) for row in jobs],
            heir="" if lock is None else heir_in(self.database.line),
        )
        while True:
            sent_at, begin = time.monotonic(), self._clock.steady()
            done, told = self.database.run(
                lambda connection: self.database.dialect.commit(connection, commit)
            )
            if told is not None:
                self._clock.learn(told, begin)
            if done or self._was_made(commit, once):
                break
        if lock is not None:
            assert isinstance(lock, SqlLock)
            lock.handed_on(commit.heir, sent_at)
        after = version + len(changes)
        self._is_untidy = self._is_untidy or after // SNAPSHOT_EVERY != version // SNAPSHOT_EVERY

    def tidy_up(self, replica: ClusterState) -> None:
        if not self._is_untidy:
            return
        self._is_untidy = False
        try:
            self._snapshots.write_next(replica.snapshot())
        except StoreError as error:  # whoever passes the next multiple tries again
            logger.warning("no snapshot was written: %s", error)

    def initialise(self, snapshot: Snapshot) -> bool:
        incarnation = new_incarnation(self.now())

        def work(connection: Connection) -> str:
            make_room(self.database, connection)
            done = self.database.execute(
                connection,
                "UPDATE {state} SET format = :format, incarnation = :incarnation, version = :version, "
                "last_fencing_token = :fencing, sequence = :sequence, server = {server} "
                "WHERE namespace = :namespace AND version IS NULL",
                format=STORED_FORMAT,
                incarnation=incarnation,
                version=snapshot.version,
                fencing=snapshot.last_fencing_token,
                sequence=snapshot.sequence,
            )
            if done.rowcount == 1:
                self._forget_history(connection)
                self._snapshots.write(connection, snapshot)
                return incarnation
            row = self._row(connection)
            assert row is not None
            return row.incarnation

        stored = self.database.write(work)
        if stored == incarnation:  # written now, or by an earlier try whose answer was lost
            self._incarnation = stored
        return stored == incarnation

    def recall(self, once: Once) -> str | None:
        kept = self.database.run(lambda connection: self._answer_to(connection, once))
        if kept is None and self._has_all_keys(once.caller):
            raise KeysFullError(MAX_KEYS)
        return None if kept is None else once.reference_in(kept)

    def replace(
        self,
        snapshot: Snapshot,
        *,
        lock: Lock | None = None,
        once: Sequence[tuple[Once, str]] = (),
    ) -> None:
        def work(connection: Connection) -> str:
            make_room(self.database, connection)
            lock_row = self.database.dialect.lock_row
            row = self._row(connection, lock_row)
            assert row is not None
            if row.version is not None and row.format > STORED_FORMAT:
                check_format(row.format, f"the state in {self.database.address}")
            self._refuse_closed(row)
            for key, _ in once:
                if (text := self._answer_to(connection, key)) is not None:
                    raise RepeatedError(key, text)
            # The earlier state may be lost, and with it the numbers it had reached: the time in ms is above
            # them. With `operator_reset` set, clients that saw another state before accept this one.
            beyond = int(row.now) * 1000
            new = with_values(
                snapshot,
                version=max(snapshot.version, (row.version or 0) + 1, beyond),
                last_fencing_token=max(snapshot.last_fencing_token, row.last_fencing_token, beyond),
                sequence=max(snapshot.sequence, row.sequence),
            )
            incarnation = new_incarnation(row.now, row.incarnation)
            self.database.execute(
                connection,
                "UPDATE {state} SET format = :format, incarnation = :incarnation, version = :version, "
                "last_fencing_token = :fencing, sequence = :sequence, server = {server}, "
                "commit_id = :commit_id, suspended_until = 0, operator_reset = :yes "
                "WHERE namespace = :namespace",
                format=STORED_FORMAT,
                incarnation=incarnation,
                version=new.version,
                fencing=new.last_fencing_token,
                sequence=new.sequence,
                commit_id=incarnation,
                yes=True,
            )
            if row.version is None:
                self._forget_history(connection)
            self._snapshots.write(connection, new)
            for key, reference in once:
                self._keep(connection, key, reference)
            return incarnation

        self._incarnation = self.database.write(work)

    def close_state(self, version: int, reason: str) -> None:
        def work(connection: Connection) -> bool:
            done = self.database.execute(
                connection,
                "UPDATE {state} SET closed = :reason WHERE namespace = :namespace AND version = :version",
                reason=reason[:MAX_REASON],
                version=version,
            )
            return bool(done.rowcount == 1)

        if not self.database.run(work):
            row, _ = self._state()
            raise StaleStateError(version, None if row is None else row.version)

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
        def work(connection: Connection) -> StateRow | None:
            make_room(self.database, connection)
            done = self.database.execute(
                connection,
                "UPDATE {state} SET format = :format, incarnation = :incarnation, version = :version, "
                "last_fencing_token = :fencing, sequence = :sequence, server = {server}, "
                "commit_id = :incarnation, suspended_until = :until, clock_jump_s = 0, clock_jump_at = 0, "
                "operator_reset = :yes, closed = '' "
                "WHERE namespace = :namespace AND "
                + ("version IS NULL" if version is None else "version = :before"),
                format=STORED_FORMAT,
                incarnation=incarnation,
                version=snapshot.version,
                fencing=snapshot.last_fencing_token,
                sequence=snapshot.sequence,
                until=suspended_until,
                yes=True,
                before=version,
            )
            if done.rowcount == 0:
                return self._row(connection)
            self._forget_history(connection, history_until)
            self._snapshots.write(connection, snapshot)
            return None

        found = self.database.write(work)
        # An earlier try may have been made, and its answer lost.
        if found is not None and found.incarnation != incarnation:
            raise StaleStateError(version or 0, found.version)
        self._incarnation = incarnation

    @property
    def incarnation(self) -> str:
        return self._incarnation

    @property
    def closed(self) -> str:
        return self._closed

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        def work(connection: Connection) -> Sequence[Any]:
            found: Sequence[Any] = self.database.execute(
                connection, _CHANGES, after=max(after, 0), limit=limit
            ).fetchall()
            return found

        try:
            return [(version, change_from_json(body)) for version, body in self.database.run(work)]
        except CorruptStateError as error:
            raise refusals.unreadable(self.database.address, error) from error

    @property
    def reports(self) -> SqlReports:
        return SqlReports(self.database)

    @property
    def jobs(self) -> SqlJobs:
        return SqlJobs(self.database)

    @property
    def witnesses(self) -> SqlWitnesses:
        return SqlWitnesses(self.database)

    @property
    def clock_jump(self) -> ClockJump | None:
        return self._clock.jump

    @property
    def suspension(self) -> Suspension:
        return self._suspension

    def suspend(self, jump: ClockJump) -> tuple[Suspension, bool]:
        def work(connection: Connection) -> bool:
            done = self.database.execute(
                connection,
                "UPDATE {state} SET suspended_until = {now} + :window_s, clock_jump_s = :jump_s, "
                "clock_jump_at = {now}, lock_token = '' WHERE namespace = :namespace "
                "AND NOT (abs(clock_jump_s - :jump_s) <= :tolerance_s AND clock_jump_at >= :since)",
                window_s=self._confirmation_window_s,
                jump_s=jump.seconds,
                tolerance_s=CLOCK_TOLERANCE_S,
                since=jump.since,
            )
            return bool(done.rowcount == 1)

        begun = self.database.run(work)
        self._state()
        return self._suspension, begun

    def lock(self, replica: ClusterState | None = None) -> Lock:
        return SqlLock(self.database)

    def await_decision(self, lease_id: str, is_decided: Callable[[], bool], timeout_s: float) -> bool:
        return poll(is_decided, timeout_s)

    def close(self) -> None:
        self.database.close()

    # ---- reading ----

    def _row(self, connection: Connection, suffix: str = "") -> StateRow | None:
        row = self.database.execute(connection, _STATE + suffix).fetchone()
        return None if row is None else StateRow(*row)

    def _state(self) -> tuple[StateRow | None, Sequence[StoredChange]]:
        """Return the checked row, None if there was no state yet."""
        return self._state_after(-1, 0)

    def _state_after(self, version: int, limit: int) -> tuple[StateRow | None, Sequence[StoredChange]]:
        """Return the checked row, and at most `limit` changes after `version`, which was read from it before.

        Both are of one moment.
        """
        begin = self._clock.steady()
        rows = self.database.run(
            lambda connection: self.database.execute(
                connection, _STATE_AND_CHANGES, after=version, limit=limit
            ).fetchall()
        )
        row = StateRow(*rows[0][: len(StateRow._fields)]) if rows else None
        if row is None or row.version is None:
            if self._incarnation:
                raise self._lost(version, "empty")
            return None, ()
        self._clock.learn(row.now, begin)
        if row.format > STORED_FORMAT:
            check_format(row.format, f"the state in {self.database.address}")
        if self._incarnation and row.incarnation != self._incarnation and not row.operator_reset:
            raise self._lost(version, "another state")
        if row.server != row.this_server:
            self._begin_recovery(row)
            return self._state_after(version, limit)
        self._incarnation, self._closed = row.incarnation, row.closed
        self._suspension = NO_SUSPENSION
        if row.suspended_until > row.now:
            self._suspension = Suspension(row.suspended_until, row.clock_jump_s)
        found = (StoredChange(*fields[len(StateRow._fields) :]) for fields in rows)
        return row, [change for change in found if change.version is not None]

    def _whole_state(self) -> ClusterState:
        while True:
            cluster = self._snapshot_and_changes()
            if cluster is not None:
                return cluster

    def _snapshot_and_changes(self) -> ClusterState | None:
        """Return the whole state; None if it was replaced in the meantime."""
        cluster = self._snapshots.read()
        while True:
            page = self.history(cluster.version, MAX_CATCH_UP)
            if not page:
                return cluster
            if page[0][0] != cluster.version + 1 or page[-1][0] != cluster.version + len(page):
                return None
            for _, change in page:
                cluster.apply(change)

    def _known_state(self) -> ClusterState | None:
        """Return the whole state but for changes that are not known; None if it was replaced meanwhile."""
        cluster = self._snapshots.read()
        while True:
            rows = self.database.run(
                lambda connection: self.database.execute(
                    connection, _CHANGES, after=cluster.version, limit=MAX_CATCH_UP
                ).fetchall()
            )
            if not rows:
                return cluster
            for version, body in rows:
                if version != cluster.version + 1:
                    return None
                if is_known(body):
                    cluster.apply(change_from_json(body))
                else:
                    cluster.version = version

    # ---- writing ----

    def _forget_history(self, connection: Connection, until: int = -1) -> None:
        """Drop the changes above that version."""
        self.database.execute(
            connection, "DELETE FROM {change} WHERE namespace = :namespace AND version > :until", until=until
        )

    def _answer_to(self, connection: Connection, key: Once) -> str | None:
        row = self.database.execute(
            connection,
            "SELECT answer FROM {once} WHERE namespace = :namespace AND caller = :caller AND name = :name "
            "AND expires_at > {now}",
            caller=key.caller,
            name=key.key,
        ).fetchone()
        return None if row is None else str(row[0])

    def _has_all_keys(self, caller: str) -> bool:
        """Return whether the caller had `MAX_KEYS` when they were counted, at most `COUNT_KEYS_S` ago."""
        counted_at, is_full = self._full.get(caller, (-math.inf, False))
        if time.monotonic() - counted_at > COUNT_KEYS_S:
            row = self.database.run(
                lambda connection: self.database.execute(
                    connection,
                    "SELECT count(*) FROM {once} WHERE namespace = :namespace AND caller = :caller "
                    "AND expires_at > {now}",
                    caller=caller,
                ).fetchone()
            )
            is_full = int(row[0]) >= MAX_KEYS
            self._full[caller] = time.monotonic(), is_full
        return is_full

    def _keep(self, connection: Connection, key: Once, reference: str) -> None:
        names = {"caller": key.caller, "name": key.key}
        self.database.execute(
            connection,
            "DELETE FROM {once} WHERE namespace = :namespace AND caller = :caller AND name = :name",
            **names,
        )
        self.database.execute(
            connection,
            "INSERT INTO {once} (namespace, caller, name, answer, expires_at) "
            "VALUES (:namespace, :caller, :name, :answer, {now} + :keep_s)",
            answer=key.stored(reference),
            keep_s=KEEP_S,
            **names,
        )

    def _begin_recovery(self, row: StateRow) -> None:
        """Start the recovery window: the last commits before the fail-over may be lost.

        Version, fencing token and sequence jump beyond all of them, so that no earlier replica passes as
        current, and no token or short id is issued twice.
        """
        cluster = self._snapshot_and_changes()
        if cluster is None or cluster.version != row.version:
            return  # another client was first: look again
        snapshot = cluster.snapshot()
        new = with_values(
            snapshot,
            version=snapshot.version + JUMP,
            last_fencing_token=max(snapshot.last_fencing_token, row.last_fencing_token) + JUMP,
            sequence=max(snapshot.sequence, row.sequence) + SEQUENCE_JUMP,
        )

        def work(connection: Connection) -> None:
            done = self.database.execute(
                connection,
                "UPDATE {state} SET version = :version, last_fencing_token = :fencing, sequence = :sequence, "
                "server = {server}, suspended_until = {now} + :window_s, clock_jump_s = 0, "
                "clock_jump_at = 0, commit_id = :commit_id "
                "WHERE namespace = :namespace AND version = :before AND server = :server",
                version=new.version,
                fencing=new.last_fencing_token,
                sequence=new.sequence,
                window_s=cluster.settings.confirmation_window_s,
                commit_id=_name(),
                before=row.version,
                server=row.server,
            )
            if done.rowcount == 1:
                self._snapshots.write(connection, new)

        self.database.write(work)

    # ---- refusals ----

    def _was_made(self, commit: Commit, once: Sequence[tuple[Once, str]]) -> bool:
        """Return whether a refused commit had been made by an earlier try; False: nothing speaks against it.

        Raises the reason of the refusal.
        """
        row, changes = self._state_after(commit.version, MAX_MISSED)
        if row is None or row.version is None:
            raise refusals.no_state(self.database.address, commit.version)
        if row.version != commit.version:
            if changes and changes[0].commit_id == commit.commit_id:
                return True
            is_whole = row.version - commit.version == len(changes)
            raise StaleStateError(
                commit.version, row.version, missed=tuple(_changes(changes) if is_whole else ())
            )
        self._refuse_closed(row)
        if row.lock_token not in {"", commit.lock_token} and row.lock_expires_at > row.now:
            raise LockedError(commit.version)
        if abs(row.now - commit.decided_at) > CLOCK_TOLERANCE_S:
            raise refusals.off_the_clock(commit.version, row.version)
        for key, _ in once:
            kept = self.database.run(lambda connection, key=key: self._answer_to(connection, key))  # type: ignore[misc]
            if kept is not None:
                raise RepeatedError(key, kept)
        left_s = row.suspended_until - row.now
        if commit.waits_for_owners and left_s > 0:
            raise refusals.unconfirmed(self._confirmation_window_s, left_s, row.clock_jump_s)
        return False

    def _refuse_closed(self, row: StateRow) -> None:
        if row.closed:
            raise StateClosedError(self.database.address, row.closed)

    def _lost(self, version: int, present: object) -> StateLostError:
        return refusals.lost(self.database.address, version, present)


def _changes(stored: Sequence[StoredChange]) -> list[Change]:
    return [change_from_json(change.body) for change in stored]


def _name() -> str:
    return os.urandom(12).hex()
