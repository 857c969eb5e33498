"""The state in a database: each commit compares and sets the version of one row, in one transaction.

A whole state is a snapshot with the changes after it, all as the codec's JSON. The client whose commit passes
a multiple of `snapshot_every` versions writes its replica as the next snapshot and drops the oldest changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from resource_manager import errors
from resource_manager.core.changes import Change, Granted, Queued
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.team_ledger import NO_USES, Use
from resource_manager.storage import refusals
from resource_manager.storage.base import FOLD_ERRORS, NO_SUSPENSION, Store, Suspension, waits_for_owners
from resource_manager.storage.clock import CLOCK_TOLERANCE_S, ClockJump, ServerClock
from resource_manager.storage.codec import change_from_json, change_to_json, check_format, is_known, skipping
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.lineage import Lineage
from resource_manager.storage.locks import Lock
from resource_manager.storage.once import Once, References
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import NO_LOCK, Commit
from resource_manager.storage.sql.expiring_rows import SqlJobs, SqlKeys, SqlReports
from resource_manager.storage.sql.lock import SqlLock, heir_in
from resource_manager.storage.sql.snapshots import SNAPSHOT_EVERY, Snapshots
from resource_manager.storage.sql.state_row import (
    CHANGES,
    STATE_AND_CHANGES,
    StateRow,
    StoredChange,
    decoded,
    new_commit_id,
)
from resource_manager.storage.sql.tables import MAX_REASON
from resource_manager.storage.sql.whole_state import WholeState

logger = logging.getLogger(__name__)

MAX_CATCH_UP = 2 * SNAPSHOT_EVERY
"""Changes that a replica lacks beyond which the whole state is read instead."""

MAX_MISSED = 64
"""Changes that a refused commit brings along."""


class SqlStore(Store):
    """A store that keeps about the last `history_length` changes; thread-safe.

    After a fail-over of PostgreSQL the last commits may be lost. The store detects that the server is on
    another timeline than the one that wrote the state. For `confirmation_window_s` of the cluster's settings,
    the recovery window, it refuses commits that grant or expire.
    """

    is_lasting = True
    suspension = NO_SUSPENSION
    clock: ServerClock

    def __init__(
        self, database: Database, *, history_length: int = 100_000, snapshot_every: int = SNAPSHOT_EVERY
    ) -> None:
        self.database = database
        self._snapshots = Snapshots(database, history_length)
        self._keys = SqlKeys(database)
        self._whole = WholeState(database, self._snapshots, self._keys)
        self._confirmation_window_s = ClusterSettings().confirmation_window_s
        self.clock = ServerClock(database.time)
        self.reports = SqlReports(database)
        self.jobs = SqlJobs(database)
        self._lineage = Lineage()
        self._is_untidy = False
        self._snapshot_every = snapshot_every

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        row, changes = self._state() if replica is None else self._state(replica.version, MAX_CATCH_UP)
        if row is None:
            return None
        assert row.version is not None
        if replica is not None and replica.version > row.version:
            raise self._lost(replica.version, row.version)
        with refusals.reading(self.database.address):
            if replica is not None and replica.version + len(changes) == row.version:
                replica.apply(*decoded(changes))
            else:
                replica = self._whole_state()
            self._confirmation_window_s = replica.settings.confirmation_window_s
            return replica

    def refresh_known(self) -> ClusterState:
        self._state()  # a recovery window is not begun below, as that writes a whole state
        try:
            with refusals.reading(self.database.address), skipping():
                return self._whole_state(known_only=True)
        except FOLD_ERRORS as error:  # of what the skipped had led to
            raise errors.NewerFormatError(
                f"{self.database.address}: a newer version wrote what later changes build on: upgrade it"
            ) from error

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
        assert lock is None or isinstance(lock, SqlLock)
        leases = [change.lease for change in changes if isinstance(change, Granted)]
        arrived = [change.sequence for change in changes if isinstance(change, Queued)]
        arrived += [lease.sequence for lease in leases]
        # The id distinguishes a commit sent again, after its answer was lost, from another client's.
        commit = Commit(
            namespace=self.database.namespace,
            version=version,
            commit_id=new_commit_id(),
            known_id=self._lineage.id_of(self.incarnation, version),
            changes=[(change.at, change_to_json(change)) for change in changes],
            decided_at=now,
            lock_token=NO_LOCK if lock is None else lock.token,
            incarnation=self.incarnation,
            fencing_token=max((lease.fencing_token for lease in leases), default=None),
            sequence=max(arrived, default=None),
            waits_for_owners=waits_for_owners(changes),
            once=[(key.caller, key.key, key.stored(reference)) for key, reference in once],
            jobs=[row._replace(caller=row.whose) for row in jobs],
            heir="" if lock is None else heir_in(self.database.line),
        )
        while True:
            sent_at, begin = time.monotonic(), self.clock.steady()
            done, told = self.database.run(
                lambda connection: self.database.dialect.commit(connection, commit)
            )
            if told is not None:
                self.clock.learn(told, begin)
            if done or self._was_made(commit, once):
                break
        if lock is not None:
            lock.handed_on(commit.heir, sent_at)
        after = version + len(changes)
        self._lineage.note(commit.incarnation, after, commit.commit_id)
        every = self._snapshot_every
        self._is_untidy = self._is_untidy or after // every != version // every

    def tidy_up(self, replica: ClusterState) -> None:
        if not self._is_untidy:
            return
        self._is_untidy = False
        try:
            self._snapshots.write_next(replica.snapshot())
        except errors.StoreError as error:  # whoever passes the next multiple tries again
            logger.warning("no snapshot was written: %s", error)

    def initialise(self, snapshot: Snapshot) -> bool:
        incarnation = new_incarnation(self.now())
        stored = self._whole.initialise(snapshot, incarnation)
        if stored == incarnation:  # written now, or by an earlier try whose answer was lost
            self.incarnation = stored
        return stored == incarnation

    def recall(self, once: Once) -> str | None:
        return self._keys.recall(once)

    def replace(self, snapshot: Snapshot, *, lock: Lock | None = None, once: References = ()) -> None:
        self.incarnation = self._whole.replace(snapshot, once)

    def close_state(self, version: int, reason: str) -> None:
        if not self.database.change(
            "UPDATE {state} SET closed = :reason WHERE namespace = :namespace AND version = :version",
            reason=reason[:MAX_REASON],
            version=version,
        ):
            row, _ = self._state()
            raise errors.StaleStateError(version, None if row is None else row.version)

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
        other = self._whole.restore(snapshot, version, incarnation, suspended_until, history_until)
        # An earlier try may have been made, and its answer lost.
        if other is not None and other.incarnation != incarnation:
            raise errors.StaleStateError(version or 0, other.version)
        self.incarnation = incarnation

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        with refusals.reading(self.database.address):
            rows = self.database.rows(CHANGES, first=max(after, 0) + 1, limit=limit)
            return [(version, change_from_json(body)) for version, body, _ in rows]

    def suspend(self, jump: ClockJump) -> tuple[Suspension, bool]:
        begun = self.database.change(
            "UPDATE {state} SET suspended_until = {now} + :window_s, clock_jump_s = :jump_s, "
            "clock_jump_at = {now}, lock_token = '' WHERE namespace = :namespace "
            "AND NOT (abs(clock_jump_s - :jump_s) <= :tolerance_s AND clock_jump_at >= :since)",
            window_s=self._confirmation_window_s,
            jump_s=jump.seconds,
            tolerance_s=CLOCK_TOLERANCE_S,
            since=jump.since,
        )
        row, _ = self._state()
        return self.suspension, begun == 1 or (row is not None and row.clock_jump_s == jump.seconds)

    def lock(self, replica: ClusterState | None = None) -> Lock:
        return SqlLock(self.database)

    def close(self) -> None:
        self.database.close()

    # ---- reading ----

    def _state(self, version: int = -1, limit: int = 0) -> tuple[StateRow | None, Sequence[StoredChange]]:
        """Return the checked row, None before the first state, and at most `limit` changes after `version`.

        That version was read from it before. Both are of one moment.
        """
        begin = self.clock.steady()
        rows = self.database.rows(STATE_AND_CHANGES, since=version, limit=limit + 1 if limit else 0)
        row = StateRow(*rows[0][: len(StateRow._fields)]) if rows else None
        if row is None or row.version is None:
            if self.incarnation:
                raise self._lost(version, "empty")
            return None, ()
        self.clock.learn(row.now, begin)
        check_format(row.format, f"the state in {self.database.address}")
        if self.incarnation and row.incarnation != self.incarnation and not row.operator_reset:
            raise self._lost(version, refusals.ANOTHER_STATE)
        if row.server != row.this_server:
            cluster = self._stored_state()
            if cluster is not None and cluster.version == row.version:  # else another client was first
                self._whole.begin_recovery(row, cluster)
            return self._state(version, limit)
        self.incarnation, self.closed = row.incarnation, row.closed
        self.suspension = NO_SUSPENSION
        if row.suspended_until > row.now:
            self.suspension = Suspension(row.suspended_until, row.clock_jump_s)
        found = (StoredChange(*fields[len(StateRow._fields) :]) for fields in rows)
        changes = [change for change in found if change.version is not None]
        if changes and changes[0].version == version:
            known_id, commit_id = self._lineage.id_of(row.incarnation, version), changes.pop(0).commit_id
            if known_id not in ("", commit_id):
                raise self._lost(version, "another history")
        if changes and changes[-1].version == row.version:
            self._lineage.note(row.incarnation, row.version, changes[-1].commit_id)
        return row, changes

    def _whole_state(self, *, known_only: bool = False) -> ClusterState:
        while (cluster := self._stored_state(known_only)) is None:
            pass  # it was replaced in the meantime
        return cluster

    def _stored_state(self, known_only: bool = False) -> ClusterState | None:
        """Return the whole state, but for unknown changes if told; None if it was replaced meanwhile."""
        cluster = self._snapshots.read()
        first, commit_id = cluster.version, ""
        while rows := self.database.rows(CHANGES, first=first, limit=MAX_CATCH_UP):
            for version, body, _ in rows:
                if version == cluster.version:  # that of the snapshot
                    continue
                if version != cluster.version + 1:
                    return None
                if known_only and not is_known(body):
                    cluster.version = version
                else:
                    cluster.apply(change_from_json(body))
            first, commit_id = cluster.version + 1, rows[-1][2]
        self._lineage.note(self.incarnation, cluster.version, commit_id)
        return cluster

    # ---- refusals ----

    def _was_made(self, commit: Commit, once: References) -> bool:
        """Return whether a refused commit had been made by an earlier try; False: nothing speaks against it.

        Raises the reason of the refusal.
        """
        row, changes = self._state(commit.version, MAX_MISSED)
        if row is None or row.version is None:
            raise refusals.no_state(self.database.address, commit.version)
        if row.version != commit.version:
            if changes and changes[0].commit_id == commit.commit_id:
                return True
            is_whole = row.version - commit.version == len(changes)
            raise errors.StaleStateError(
                commit.version, row.version, missed=tuple(decoded(changes) if is_whole else ())
            )
        self._whole.refuse_closed(row)
        if row.lock_token not in {"", commit.lock_token} and row.lock_expires_at > row.now:
            raise errors.LockedError(commit.version)
        if abs(row.now - commit.decided_at) > CLOCK_TOLERANCE_S:
            raise refusals.off_the_clock(commit.version, row.version)
        for key, _ in once:
            kept = self.database.run(lambda connection, key=key: self._keys.answer_to(connection, key))  # type: ignore[misc]
            if kept is not None:
                raise errors.RepeatedError(key, kept)
        left_s = row.suspended_until - row.now
        if commit.waits_for_owners and left_s > 0:
            raise refusals.unconfirmed(self._confirmation_window_s, left_s, row.clock_jump_s)
        return False

    def _lost(self, version: int, present: object) -> errors.StateLostError:
        return refusals.lost(self.database.address, version, present)
