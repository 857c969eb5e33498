"""The lock that orders the commits of all clients of a database, first come, first served."""

from __future__ import annotations

import math
import time
from contextlib import closing, suppress

from resource_manager.errors import ResourceManagerError, StoreUnavailableError
from resource_manager.storage.locks import LOCK_TTL_S, Meanwhile, ThreadLock, TimedLock
from resource_manager.storage.sql.database import Database, Line
from resource_manager.storage.sql.dialect import HANDED_ON_S, LEAVE_NEXT, NEXT_WAITER, Connection

HEARTBEAT_S = 5.0
BEAT_EVERY_S = 1.0
"""Time to live of a waiter's heartbeat: those behind a dead one wait for as long."""

MEANWHILE_S = 0.05
"""Time between two readings of what others commit during a long wait."""

MAX_PASSES = 7
"""How often the lock goes from thread to thread of a process before others in the database get it."""

BEFORE_ALL = -1
"""The position of a claim that does not wait: it counts only if nobody waits."""

_TAKE = """
UPDATE {state} SET lock_token = :token, lock_expires_at = {now} + :life_s
WHERE namespace = :namespace AND (lock_token = '' OR lock_token = :token OR lock_expires_at <= {now})
AND NOT EXISTS (SELECT 1 FROM {lock} l WHERE l.namespace = :namespace AND l.expires_at > {now}
                AND (l.position < :position OR :position < 0) AND l.token <> :token)
"""
_LOOK = """
SELECT CASE WHEN s.lock_token = :token THEN 1 ELSE 0 END,
  CASE WHEN s.lock_token = '' THEN 0 ELSE s.lock_expires_at - {now} END, l.position,
  (SELECT count(*) FROM {lock} a WHERE a.namespace = :namespace AND a.expires_at > {now}
   AND a.position < l.position)
FROM {state} s LEFT JOIN {lock} l ON l.namespace = :namespace AND l.token = :token
WHERE s.namespace = :namespace
"""
_BOUNDS = (
    "UPDATE {state} SET lock_expires_at = {now} + :life_s "
    "WHERE namespace = :namespace AND lock_expires_at > {now} + :life_s",
    "UPDATE {lock} SET expires_at = {now} + :heartbeat_s "
    "WHERE namespace = :namespace AND expires_at > {now} + :heartbeat_s",
)
"""What ends in time although the server's clock was set back: else the dead would keep the lock as long."""

_HAND_ON = f"""
UPDATE {{state}} SET lock_token = COALESCE({NEXT_WAITER}, ''), lock_expires_at = {{now}} + {HANDED_ON_S}
WHERE namespace = :namespace AND lock_token = :token
"""


class LocalClaim(ThreadLock):
    """A place among the threads of this process that want the lock under these tokens."""

    __slots__ = ("claim", "inherited_at")

    def __init__(self, line: Line, claim: str) -> None:
        super().__init__(line)
        self.claim = claim
        self.inherited_at: float | None = None


def heir_in(line: Line) -> str:
    """Return the token of the next thread of this process; empty if it is another process's turn."""
    with line.guard:
        following = line.waiters[0] if line.waiters and line.passes < MAX_PASSES else None
        return following.claim if isinstance(following, LocalClaim) else ""


class SqlLock(TimedLock):
    """A first come, first served lock between all processes that reach one database.

    The holder's token is in the row that each commit compares. One thread of each process stands in line for
    it, the others wait for that one. Waiters stand in a table and send heartbeats; the holder who gives the
    lock back hands it to the first of them that is alive. A commit under the lock hands it on by itself, a
    few times to another thread of the process.
    """

    def __init__(self, database: Database, *, life_s: float = LOCK_TTL_S) -> None:
        super().__init__(life_s)
        self._database = database
        self._local = LocalClaim(database.line, "")

    def _claim(self, token: str, deadline: float, meanwhile: Meanwhile) -> float | None:
        self._local = local = LocalClaim(self._database.line, token)
        taken_at, came = None, False
        try:
            came = local.acquire(max(deadline - time.monotonic(), 0.0))
            if came and local.inherited_at is not None:
                self._database.line.passes += 1
                taken_at = local.inherited_at + HANDED_ON_S - self._life_s
            elif came:
                self._database.line.passes = 0
                taken_at = self._claim_here(token, deadline, meanwhile)
            self.waited = self.waited or local.waited
            return taken_at
        finally:
            if taken_at is None:
                if local.inherited_at is not None:
                    self._free(token)
                if came:
                    local.release()

    def _claim_here(self, token: str, deadline: float, meanwhile: Meanwhile) -> float | None:
        """Claim the lock for this process, where no other thread claims or holds it."""
        since = time.monotonic()
        try:
            if not self._database.contended or deadline <= since:
                self.waited = not self._take(token, BEFORE_ALL)
                if not self.waited:
                    return since
                if deadline <= since:
                    return None
            taken_at = self._wait(token, deadline, meanwhile)
            self._database.contended = self.waited
            return taken_at
        except BaseException as error:
            with suppress(StoreUnavailableError):
                self._leave(token)
                if not isinstance(error, StoreUnavailableError):
                    self._free(token)
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
        beat_at = -math.inf
        looked_at = time.monotonic()
        self.waited = False
        with closing(self._database.waiter(token)) as waiter:
            while True:
                since = time.monotonic()
                if beat_at == -math.inf:
                    self._enter(token)
                    beat_at = since
                elif since - beat_at > BEAT_EVERY_S:
                    self._change(
                        "UPDATE {lock} SET expires_at = {now} + :heartbeat_s WHERE token = :token", token
                    )
                    for statement in _BOUNDS:
                        self._change(statement, token)
                    beat_at = since
                row = self._database.row(_LOOK, token=token)
                if row is None:
                    self._database.run(lambda connection: make_room(self._database, connection))
                    continue
                is_mine, held_for_s, position, ahead = row[0], float(row[1]), row[2], row[3]
                if is_mine:
                    waiter.came()
                    if position is not None:
                        self._leave(token)
                    return since + held_for_s - self._life_s
                if position is None:  # taken for dead, and removed
                    beat_at = -math.inf
                    continue
                if ahead == 0 and held_for_s <= 0 and self._take(token, position):
                    self._leave(token)
                    return since
                self.waited = True
                wait_s = deadline - time.monotonic()
                if wait_s <= 0:
                    self._leave(token)
                    if self._is_held(token):  # it was handed on at the last moment
                        return since + HANDED_ON_S - self._life_s
                    return None
                if waiter.wait(max(min(wait_s, held_for_s if ahead == 0 else wait_s), 0.002), ahead):
                    return since + HANDED_ON_S - self._life_s
                # It may be this one's turn if nobody is before it.
                if ahead > 1 and time.monotonic() - looked_at > MEANWHILE_S:
                    meanwhile()
                    looked_at = time.monotonic()

    def _enter(self, token: str) -> None:
        values = {"namespace": self._database.namespace, "token": token, "heartbeat_s": HEARTBEAT_S}
        self._database.run(lambda connection: self._database.dialect.enter(connection, values))

    def _leave(self, token: str) -> None:
        self._change("DELETE FROM {lock} WHERE token = :token", token)

    def _is_held(self, token: str) -> bool:
        held = "SELECT 1 FROM {state} WHERE namespace = :namespace AND lock_token = :token"
        return self._database.row(held, token=token) is not None

    def let_expire(self) -> None:
        super().let_expire()
        self._local.release()

    def _hand_on(self, token: str) -> bool:
        try:
            return self._free(token)
        finally:
            self._local.release()

    def handed_on(self, heir: str, sent_at: float) -> None:
        """Note that a commit, sent at that time, handed the lock on, to the thread `heir` if it names one."""
        is_here = False
        with self._database.line.guard:
            following = next(iter(self._database.line.waiters), None)
            if isinstance(following, LocalClaim) and following.claim == heir:
                following.inherited_at, is_here = sent_at, True
        if heir and not is_here:  # it does not wait any more
            with suppress(ResourceManagerError):
                self._free(heir)
        self.released()

    def _free(self, token: str) -> bool:
        """Hand the lock to the next waiter; return False if it is not held."""

        def work(connection: Connection) -> tuple[bool, str]:
            if self._database.execute(connection, _HAND_ON, token=token).rowcount != 1:
                return False, ""
            self._database.execute(connection, LEAVE_NEXT)
            row = self._database.execute(
                connection, "SELECT lock_token FROM {state} WHERE namespace = :namespace"
            ).fetchone()
            return True, row[0]

        freed, following = self._database.write(work)
        if following and self._database.dialect.wake:
            # A waiter that is not woken looks by itself; the lock is its own already.
            with suppress(ResourceManagerError):
                self._database.row(self._database.dialect.wake, token=following)
        return freed

    def _change(self, statement: str, token: str, **values: object) -> bool:
        more = {"life_s": self._life_s, "heartbeat_s": HEARTBEAT_S, **values}
        return self._database.change(statement, token=token, **more) == 1


def make_room(database: Database, connection: Connection) -> None:
    """Write the row of a namespace without a state, which the lock needs."""
    database.execute(
        connection,
        "INSERT INTO {state} (namespace, format, incarnation, version, last_fencing_token, sequence, "
        "commit_id, server, suspended_until, clock_jump_s, clock_jump_at, operator_reset, closed, "
        "lock_token, lock_expires_at) "
        "SELECT :namespace, 1, '', NULL, 0, 0, '', '', 0, 0, 0, :no, '', '', 0 "
        "FROM (SELECT 1 AS one) AS single "
        "WHERE NOT EXISTS (SELECT 1 FROM {state} WHERE namespace = :namespace)",
        no=False,
    )
