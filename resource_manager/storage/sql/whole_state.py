"""Whole states that are written at once: the first, one in the place of another, one after a fail-over."""

from __future__ import annotations

from dataclasses import replace as with_values
from typing import Any

from resource_manager import STORED_FORMAT
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.errors import RepeatedError, StateClosedError
from resource_manager.storage.codec import check_format
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.once import References
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection
from resource_manager.storage.sql.expiring_rows import SqlKeys
from resource_manager.storage.sql.lock import make_room
from resource_manager.storage.sql.snapshots import Snapshots
from resource_manager.storage.sql.state_row import JUMP, SEQUENCE_JUMP, StateRow, new_commit_id, state_row


class WholeState:
    """The state of a namespace; each write is one transaction."""

    def __init__(self, database: Database, snapshots: Snapshots, keys: SqlKeys) -> None:
        self._database = database
        self._snapshots = snapshots
        self._keys = keys

    def initialise(self, snapshot: Snapshot, incarnation: str) -> str:
        """Write the first state, unless there is one; return the incarnation of the one there is then."""

        def work(connection: Connection) -> str:
            make_room(self._database, connection)
            if self._set(connection, snapshot, " AND version IS NULL", incarnation):
                self._forget_history(connection)
                self._snapshots.write(connection, snapshot)
                return incarnation
            row = state_row(self._database, connection)
            assert row is not None
            return row.incarnation

        return self._database.write(work)

    def replace(self, snapshot: Snapshot, once: References) -> str:
        """Write a state in the place of any other; return its incarnation."""

        def work(connection: Connection) -> str:
            make_room(self._database, connection)
            row = state_row(self._database, connection, self._database.dialect.lock_row)
            assert row is not None
            check_format(row.format, f"the state in {self._database.address}")
            self.refuse_closed(row)
            for key, _ in once:
                if (text := self._keys.answer_to(connection, key)) is not None:
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
            more = ", commit_id = :incarnation, suspended_until = 0, operator_reset = :yes"
            self._set(connection, new, "", incarnation, more, yes=True)
            if row.version is None:
                self._forget_history(connection)
            self._snapshots.write(connection, new)
            for key, reference in once:
                self._keys.keep(connection, key, reference)
            return incarnation

        return self._database.write(work)

    def restore(
        self,
        snapshot: Snapshot,
        version: int | None,
        incarnation: str,
        suspended_until: float,
        history_until: int,
    ) -> StateRow | None:
        """Write a state in the place of that version; return the row of another one that is there."""

        def work(connection: Connection) -> StateRow | None:
            make_room(self._database, connection)
            done = self._set(
                connection,
                snapshot,
                " AND version IS NULL" if version is None else " AND version = :before",
                incarnation,
                ", commit_id = :incarnation, suspended_until = :until, clock_jump_s = 0, clock_jump_at = 0, "
                "operator_reset = :yes, closed = ''",
                until=suspended_until,
                yes=True,
                before=version,
            )
            if not done:
                return state_row(self._database, connection)
            self._forget_history(connection, history_until)
            self._snapshots.write(connection, snapshot)
            return None

        return self._database.write(work)

    def begin_recovery(self, row: StateRow, cluster: ClusterState) -> None:
        """Start the recovery window: the last commits before the fail-over may be lost.

        Version, fencing token and sequence jump beyond all of them, so that no earlier replica passes as
        current, and no token or short id is issued twice.
        """
        snapshot = cluster.snapshot()
        new = with_values(
            snapshot,
            version=snapshot.version + JUMP,
            last_fencing_token=max(snapshot.last_fencing_token, row.last_fencing_token) + JUMP,
            sequence=max(snapshot.sequence, row.sequence) + SEQUENCE_JUMP,
        )

        def work(connection: Connection) -> None:
            done = self._set(
                connection,
                new,
                " AND version = :before AND server = :server",
                None,
                ", suspended_until = {now} + :window_s, clock_jump_s = 0, clock_jump_at = 0, "
                "commit_id = :commit_id",
                window_s=cluster.settings.confirmation_window_s,
                commit_id=new_commit_id(),
                before=row.version,
                server=row.server,
            )
            if done:
                self._snapshots.write(connection, new)

        self._database.write(work)

    def refuse_closed(self, row: StateRow) -> None:
        """Raise `StateClosedError` for a state that takes no more changes."""
        if row.closed:
            raise StateClosedError(self._database.address, row.closed)

    def _set(
        self,
        connection: Connection,
        snapshot: Snapshot,
        where: str,
        incarnation: str | None,
        more: str = "",
        **values: Any,
    ) -> bool:
        """Set the row's numbers to those of the snapshot, and `more`; return False if it is not `where`."""
        if incarnation is not None:
            more = f", format = :format, incarnation = :incarnation{more}"
            values |= {"format": STORED_FORMAT, "incarnation": incarnation}
        done = self._database.execute(
            connection,
            "UPDATE {state} SET version = :version, last_fencing_token = :fencing, sequence = :sequence, "
            "server = {server}" + more + " WHERE namespace = :namespace" + where,
            version=snapshot.version,
            fencing=snapshot.last_fencing_token,
            sequence=snapshot.sequence,
            **values,
        )
        return bool(done.rowcount == 1)

    def _forget_history(self, connection: Connection, until: int = -1) -> None:
        """Drop the changes above that version."""
        self._database.execute(
            connection, "DELETE FROM {change} WHERE namespace = :namespace AND version > :until", until=until
        )
