"""The lock that orders the commits of all clients of a database, first come, first served."""

from __future__ import annotations

import time
from contextlib import closing, suppress

from resource_manager.errors import ResourceManagerError, StoreUnavailableError
from resource_manager.storage.locks import LOCK_TTL_S, Meanwhile, TimedLock
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection

HEARTBEAT_S = 5.0
BEAT_EVERY_S = 1.0
"""Time to live of a waiter's heartbeat: those behind a dead one wait for as long."""

BEFORE_ALL = -1
"""The position of a claim that does not wait: it counts only if nobody waits."""

_TAKE = """
UPDATE {state} SET lock_token = :token, lock_expires_at = {now} + :life_s
WHERE namespace = :namespace AND (lock_token = '' OR lock_token = :token OR lock_expires_at <= {now})
AND NOT EXISTS (SELECT 1 FROM {lock} l WHERE l.namespace = :namespace AND l.expires_at > {now}
                AND (l.position < :position OR :position < 0) AND l.token <> :token)
"""
_LOOK = """
SELECT l.position, (SELECT count(*) FROM {lock} a WHERE a.namespace = :namespace AND a.expires_at > {now}
                    AND a.position < l.position),
  CASE WHEN s.lock_token = '' THEN 0 ELSE s.lock_expires_at - {now} END
FROM {lock} l JOIN {state} s ON s.namespace = l.namespace WHERE l.token = :token AND l.namespace = :namespace
"""


class SqlLock(TimedLock):
    """A first come, first served lock between all processes that reach one database.

    The holder's token is in the row that each commit compares. Waiters stand in a table, send heartbeats, and
    the first of them that is alive takes a free lock.
    """

    def __init__(self, database: Database, *, life_s: float = LOCK_TTL_S) -> None:
        super().__init__(life_s)
        self._database = database

    def _claim(self, token: str, deadline: float, meanwhile: Meanwhile) -> float | None:
        since = time.monotonic()
        try:
            self.waited = not self._take(token, BEFORE_ALL)
            if not self.waited:
                return since
            if deadline <= since:
                return None
            return self._wait(token, deadline, meanwhile)
        except BaseException as error:
            with suppress(StoreUnavailableError):
                self._leave(token)
                if not isinstance(error, StoreUnavailableError):
                    self._hand_on(token)
            raise

    def _extend(self, token: str) -> bool:
        return self._change(
            "UPDATE {state} SET lock_expires_at = {now} + :life_s "
            "WHERE namespace = :namespace AND lock_token = :token",
            token,
        )

    def _take(self, token: str, position: int) -> bool:
        if self._change(_TAKE, token, position=position):
            return True
        if self._database.row("SELECT 1 FROM {state} WHERE namespace = :namespace") is None:
            self._database.run(lambda connection: make_room(self._database, connection))
            return self._change(_TAKE, token, position=position)
        return False

    def _wait(self, token: str, deadline: float, meanwhile: Meanwhile) -> float | None:
        """Stand in line; return when the lock was taken, by the steady clock, None if the deadline passed."""
        position: int | None = None
        beat_at = 0.0
        with closing(self._database.waiter(token)) as waiter:
            while True:
                since = time.monotonic()
                if position is None:
                    self._change(
                        "INSERT INTO {lock} (namespace, token, expires_at) "
                        "VALUES (:namespace, :token, {now} + :heartbeat_s)",
                        token,
                    )
                    beat_at = since
                elif since - beat_at > BEAT_EVERY_S:
                    self._change(
                        "UPDATE {lock} SET expires_at = {now} + :heartbeat_s WHERE token = :token", token
                    )
                    beat_at = since
                row = self._database.row(_LOOK, token=token)
                if row is None:  # taken for dead, and removed
                    position = None
                    continue
                position, ahead, held_for_s = int(row[0]), row[1], row[2]
                if ahead == 0 and held_for_s <= 0 and self._take(token, position):
                    self._leave(token)
                    return since
                wait_s = deadline - time.monotonic()
                if wait_s <= 0:
                    self._leave(token)
                    return None
                waiter.wait(max(min(wait_s, held_for_s if ahead == 0 else wait_s), 0.002), ahead)
                if ahead > 1:  # it may be this one's turn otherwise
                    meanwhile()

    def _leave(self, token: str) -> None:
        self._change("DELETE FROM {lock} WHERE token = :token", token)

    def _hand_on(self, token: str) -> bool:
        freed = self._change(
            "UPDATE {state} SET lock_token = '', lock_expires_at = 0 "
            "WHERE namespace = :namespace AND lock_token = :token",
            token,
        )
        if freed:
            # A waiter that is not woken looks by itself; the lock is free already.
            with suppress(ResourceManagerError):
                self._wake_next()
        return freed

    def _wake_next(self) -> None:
        wake = self._database.dialect.wake
        if not wake:
            return
        row = self._database.row(
            "SELECT token FROM {lock} WHERE namespace = :namespace AND expires_at > {now} "
            "ORDER BY position LIMIT 1"
        )
        if row is not None:
            self._database.row(wake, token=row[0])

    def _change(self, statement: str, token: str, **values: object) -> bool:
        def work(connection: Connection) -> bool:
            done = self._database.execute(
                connection, statement, token=token, life_s=self._life_s, heartbeat_s=HEARTBEAT_S, **values
            )
            return bool(done.rowcount == 1)

        return self._database.run(work)


def make_room(database: Database, connection: Connection) -> None:
    """Write the row of a namespace without a state, which the lock needs."""
    database.execute(
        connection,
        "INSERT INTO {state} (namespace, format, incarnation, version, last_fencing_token, sequence, "
        "commit_id, server, suspended_until, operator_reset, moved_to, lock_token, lock_expires_at) "
        "SELECT :namespace, 1, '', NULL, 0, 0, '', '', 0, :no, '', '', 0 "
        "FROM (SELECT 1 AS one) AS single "
        "WHERE NOT EXISTS (SELECT 1 FROM {state} WHERE namespace = :namespace)",
        no=False,
    )
