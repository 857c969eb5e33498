"""The parts of SQL in which the databases differ, and the statements of a commit that they share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

from sqlalchemy import Engine, PoolProxiedConnection

from resource_manager import STORED_FORMAT
from resource_manager.storage.clock import CLOCK_TOLERANCE_S
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.sql.tables import TABLES
from resource_manager.storage.sql.views import Json

FaultKind = Literal["missing", "busy", "locked", "away", "read-only", "full", "corrupt", "rights", "refused"]
"""Kinds of a driver's error: `missing` tables, a transaction to be tried again (`busy`), a lock that another
session held for `LOCK_WAIT_S` (`locked`), a server that is `away` or takes no writes (`read-only`), a `full`
disk, data that is not a database (`corrupt`), lacking `rights`, anything else."""

LOCK_WAIT_S = 4
"""Longest wait for a lock of another session, less than for an answer: else the server goes on waiting for it
when nobody wants the answer any more, and makes then what it was asked for."""

IDLE_S = 10
"""Longest pause within a transaction, after which the server ends it: a process that hangs, or whose machine
is gone, would lock all others out."""


Connection = PoolProxiedConnection
"""A connection of the driver, lent by the pool: each statement commits by itself, except between `begin` and
COMMIT."""

IS_CURRENT = "is_current"
"""Key in the `info` of a connection: a function that says whether it still leads to the store of its URL."""

POLL_S = 0.5
"""Longest sleep of a waiter for the lock before it looks again."""

MIN_POLL_S = 0.0005
MAX_TURN_S = 0.01
"""Shortest sleep of a waiter, and the longest time that a turn is taken to need."""

ENOUGH_TURNS = 4
"""Turns of others from which a waiter learns how long one takes."""

HANDED_ON_S = 5.0
"""Time to live of a lock that was handed to a waiter, until it is renewed."""

NO_LOCK = "-"
"""The token of a commit without the lock; no lock has it."""

NEXT_WAITER = (
    "(SELECT l.token FROM {lock} l WHERE l.namespace = :namespace AND l.expires_at > {now} "
    "ORDER BY l.position LIMIT 1{lock_row})"
)
"""The token to which the lock is handed on; as its row is locked, it cannot leave the line meanwhile."""

ENTER = (
    "INSERT INTO {lock} (namespace, token, expires_at) SELECT :namespace, :token, {now} + :heartbeat_s "
    "FROM ({unsynced}) AS single WHERE NOT EXISTS (SELECT 1 FROM {lock} l WHERE l.token = :token)"
)
"""A waiter gets into the line once, also where this is sent again because its answer was lost."""

LEAVE_NEXT = "DELETE FROM {lock} WHERE token = (SELECT lock_token FROM {state} WHERE namespace = :namespace)"


JOB_COLUMNS = "(namespace, name, caller, body, expires_at)"

UPSERT_JOB = (
    "ON CONFLICT (namespace, name) DO UPDATE SET expires_at = excluded.expires_at, "
    "caller = CASE WHEN excluded.body = '' THEN old.caller ELSE excluded.caller END, "
    "body = CASE WHEN excluded.body = '' THEN old.body ELSE excluded.body END"
)
"""End of an insert into `{job} AS old`: an empty text changes only how long a row is kept."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A driver's error in plain words."""

    kind: FaultKind
    text: str


class Commit(NamedTuple):
    """A commit: each change as (time in s, JSON), each idempotency key as (caller, key, text to keep).

    `known_id` is that of the commit that led to `version`, empty if unknown. The callers of `jobs` are
    digests."""

    namespace: str
    version: int
    commit_id: str
    known_id: str
    changes: Sequence[tuple[float, str]]
    decided_at: float
    lock_token: str
    incarnation: str
    fencing_token: int | None
    sequence: int | None
    waits_for_owners: bool
    once: Sequence[tuple[str, str, str]]
    jobs: Sequence[JobRow]
    heir: str

    @property
    def hands_on(self) -> bool:
        """Return whether the commit is made under the lock, which it hands on: to `heir`, or to the next."""
        return self.lock_token != NO_LOCK

    @property
    def frees(self) -> bool:
        """Return whether the lock goes to the next in line."""
        return self.hands_on and not self.heir

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of `update`, and numbered ones of the changes, the keys and the jobs."""
        values: dict[str, Any] = {
            "namespace": self.namespace,
            "version": self.version,
            "new_version": self.version + len(self.changes),
            "commit_id": self.commit_id,
            "known_id": self.known_id,
            "decided_at": self.decided_at,
            "lock_token": self.lock_token,
            "heir": self.heir,
            "incarnation": self.incarnation,
            "fencing_token": self.fencing_token,
            "sequence": self.sequence,
        }
        for number, (at, body) in enumerate(self.changes):
            values |= {f"at_{number}": at, f"body_{number}": body}
        for number, (caller, name, text) in enumerate(self.once):
            values |= {f"caller_{number}": caller, f"name_{number}": name, f"text_{number}": text}
        for number, row in enumerate(self.jobs):
            values |= {f"job_{field}_{number}": value for field, value in row._asdict().items()}
        return values


class Pace:
    """How fast the lock goes from waiter to waiter, as one process sees it."""

    def __init__(self) -> None:
        self.turn_s = 2 * MIN_POLL_S

    def saw(self, turns: int, seconds: float) -> bool:
        """Learn that so many waiters had their turn in that time; return False if they are too few.

        Fast turns count more: a waiter that oversleeps its turn delays all behind it, to whom work then seems
        to take longer than it does.
        """
        if turns < ENOUGH_TURNS:
            return False
        self.turn_s = max(min(seconds / turns, 1.25 * self.turn_s, MAX_TURN_S), MIN_POLL_S)
        return True


class Poller:
    """A waiter that nothing wakes: it looks again when half of those before it should have had their turn.

    The next in line looks often, and ever less for a lock that is held for long.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since, self._before = 0.0, 0
        self._ahead = -1
        self._pause_s = 0.0

    def wait(self, seconds: float, ahead: int) -> bool:
        """Sleep for at most `seconds`, until the lock is released, perhaps; `ahead` others come first.

        Return whether the lock was handed to this waiter, False if that is not known.
        """
        now = time.monotonic()
        if self._ahead < 0 or self._pace.saw(self._before - ahead, now - self._since):
            self._since, self._before = now, ahead
        pause_s = max(self._pace.turn_s * (ahead - 1) / 2, MIN_POLL_S)
        if ahead == self._ahead:
            pause_s = max(pause_s, 1.2 * self._pause_s)
        self._ahead, self._pause_s = ahead, pause_s
        time.sleep(min(seconds, POLL_S, pause_s))
        return False

    def came(self) -> None:
        """Note that the lock was handed to this waiter."""
        self._pace.saw(self._before, time.monotonic() - self._since)

    def close(self) -> None:
        """Do nothing: there is nothing open."""


POOL: dict[str, Any] = {
    "isolation_level": "AUTOCOMMIT",
    "pool_size": 4,
    "max_overflow": 28,
    "pool_reset_on_return": None,
}
"""Options of every engine."""


class Dialect(Protocol):
    """One kind of database, with its own SQL and the module of its `driver`.

    `now` is its clock in seconds since 1970, `server` names who holds the data, `lock_row` ends a SELECT that
    reserves its row, `unsynced` has what this statement writes not wait for the disk where the server can,
    `wake` wakes a waiter for the lock (empty where nothing can), `in_style` writes the parameters `:name` as
    the driver wants them.
    """

    title: str
    driver: Any
    now: str
    server: str = "''"
    begin: str
    schema: str | None = None
    prefix: str = ""
    wake: str = ""
    lock_row: str = " FOR UPDATE"
    unsynced: str = "SELECT 1 AS one"
    json: Json

    def engine(self) -> Engine:
        """Return an engine that has not connected yet; raises `SettingsError`."""

    @classmethod
    def quoted(cls, table: str) -> str:
        """Return the full name of a table as it stands in a statement."""

    @staticmethod
    def in_style(statement: str) -> str:
        """Return the statement with its parameters as the driver wants them."""
        return re.sub(r"(?<![:\w]):(\w+)", r"%(\1)s", statement.replace("%", "%%"))

    def commit(self, connection: Connection, commit: Commit) -> tuple[bool, float | None]:
        """Write all of the commit if nothing speaks against it, else nothing; return the time, too, if it
        costs nothing.
        """

    def enter(self, connection: Connection, values: Mapping[str, Any]) -> None:
        """Put a waiter into the line for the lock, which need not survive a crash of the server."""
        execute(self, connection, ENTER, values)

    def waiter(self, token: str, pace: Pace, lend: Callable[[], Connection]) -> Poller:
        """Return a place to sleep until `wake` is executed with that token as `:token`."""
        return Poller(pace)

    def replacing(self, row: str, key: Sequence[str], values: Sequence[str]) -> str:
        """Return the statement that writes a row in the place of the one with its key, if there is one.

        `row` is the table with these columns, and VALUES.
        """
        return f"REPLACE INTO {row}"

    def quoted_column(self, name: str) -> str:
        """Return the name of a column as it stands in a statement."""
        return f'"{name}"'

    def examine(self, connection: Connection) -> list[tuple[bool, str]]:
        """Return what speaks for the server and its settings (True), or against them."""

    def grant(self, connection: Connection, rights: str, table: str) -> str:
        """Return the statement by which an owner gives this user rights on a table, or on all if empty."""

    def explain(self, error: BaseException) -> Fault:
        """Return the driver's error in plain words."""


def job_values(number: int) -> str:
    """Return the values of a row of `job` after its namespace."""
    return f":job_name_{number}, :job_caller_{number}, :job_text_{number}, {{now}} + :job_keep_s_{number}"


def update(commit: Commit) -> str:
    """Return the compare-and-set of this commit, with the parameters `commit.values`."""
    return _update(
        bool(commit.incarnation),
        commit.fencing_token is not None,
        commit.sequence is not None,
        commit.waits_for_owners,
        commit.hands_on,
        commit.frees,
        len(commit.once),
    )


@lru_cache(maxsize=64)
def _update(
    is_known: bool, grants: bool, arrives: bool, waits: bool, hands_on: bool, frees: bool, keys: int
) -> str:
    sets = ["version = :new_version", "commit_id = :commit_id"]
    guards = [
        "namespace = :namespace",
        "version = :version",
        f"format <= {STORED_FORMAT}",
        "closed = ''",
        "server = {server}",
        "(lock_token = '' OR lock_token = :lock_token OR lock_expires_at <= {now})",
        f"abs({{now}} - :decided_at) <= {CLOCK_TOLERANCE_S}",
        "NOT EXISTS (SELECT 1 FROM {change} c WHERE c.namespace = :namespace AND c.version = :version "
        "AND :known_id NOT IN ('', c.commit_id))",
    ]
    if grants:
        sets.append("last_fencing_token = :fencing_token")
    if waits:
        guards.append("suspended_until <= {now}")
    if arrives:
        # A request that waits again, or is granted after its wait, has its old number.
        sets.append("sequence = CASE WHEN sequence < :sequence THEN :sequence ELSE sequence END")
    if hands_on:
        heir = f"COALESCE({NEXT_WAITER}, '')" if frees else ":heir"
        sets += [f"lock_token = {heir}", f"lock_expires_at = {{now}} + {HANDED_ON_S}"]
    if is_known:
        guards.append("(incarnation = :incarnation OR operator_reset)")
    guards += [
        "NOT EXISTS (SELECT 1 FROM {once} o WHERE o.namespace = :namespace "
        f"AND o.caller = :caller_{number} AND o.name = :name_{number} AND o.expires_at > {{now}})"
        for number in range(keys)
    ]
    return f"UPDATE {{state}} SET {', '.join(sets)} WHERE {' AND '.join(guards)}"


@lru_cache(maxsize=256)
def written(dialect: type[Any], statement: str) -> str:
    """Return the statement for the driver: with the names of tables in the place of `{state}`, with `{now}`,
    `{server}`, and parameters in the driver's style.
    """
    names = {name: dialect.quoted(name) for name in TABLES}
    own = {name: getattr(dialect, name) for name in ("now", "server", "lock_row", "unsynced")}
    full: str = dialect.in_style(statement.format(**names, **own))
    return full


def execute(dialect: Dialect, connection: Connection, statement: str, values: Mapping[str, Any]) -> Any:
    """Execute a statement as `written` takes it; return the driver's cursor."""
    cursor = connection.cursor()
    cursor.execute(written(type(dialect), statement), values)
    return cursor
