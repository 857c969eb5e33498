"""PostgreSQL through psycopg: a commit is one statement, also behind a pooler."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import Connection as DriverConnection
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import Engine, create_engine

from resource_manager.errors import SettingsError, redact
from resource_manager.storage.once import KEEP_S
from resource_manager.storage.sql import dialect
from resource_manager.storage.sql.tables import SCHEMA
from resource_manager.storage.sql.views import POSTGRESQL

TIMEOUT_S = 5.0

MAX_LISTED, MANY = 8, -1
"""Changes that a statement has parameters of their own for; more travel as one text, which takes longer."""

LISTEN_AFTER_S = 0.01
LISTEN_BEHIND = 8
"""Time for which a waiter for the lock polls before it listens, and most others before one that listens: each
notice wakes all sessions that do."""

WAKE = "pg_notify('gpu_manager_' || {token}, '')"
WOKEN = f", (SELECT {WAKE.format(token='lock_token')} FROM done WHERE lock_token <> '')"

_STATES: dict[str, tuple[dialect.FaultKind, str]] = {
    "28P01": ("rights", "it refused the login: check user and password in the URL"),
    "28000": ("rights", "it refused the login: check user and password in the URL, and its pg_hba.conf"),
    "3D000": ("refused", "there is no such database: create it, or check its name in the URL"),
    "42501": (
        "rights",
        "its user lacks rights: grant those in docs/stores.md, or run gpu-manager store check",
    ),
    "22P05": ("refused", "it has no UTF-8: create a database with ENCODING 'UTF8'"),
    "25006": ("read-only", "it is read-only, as a standby is: connect to the primary"),
    "42P01": ("missing", "its tables are missing: run gpu-manager store create"),
    "3F000": ("missing", "its tables are missing: run gpu-manager store create"),
    "42703": ("corrupt", "its tables are of another version of this software"),
    "53100": ("full", "its disk is full"),
    "53200": ("full", "it is out of memory"),
    "53300": (
        "away",
        "it has no connection left: raise max_connections or its user's limit, or use a pooler",
    ),
    "25P03": ("away", "it ended a transaction that was left open"),
    "25P04": ("away", "it ended a transaction that took long"),
    "40001": ("busy", "its transactions disturbed each other"),
    "40P01": ("busy", "its transactions disturbed each other"),
    "55P03": ("locked", "another session keeps its tables locked: see pg_locks"),
    "57P01": ("away", "it is shutting down"),
    "57P02": ("away", "it has crashed"),
    "57P03": ("away", "it is starting: try again shortly"),
    "57P05": ("away", "it ended a session that was idle"),
}
_WORDS: tuple[tuple[str, str], ...] = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("no pg_hba.conf entry", "28000"),
    ("too many c", "53300"),
    ("permission denied for database", "42501"),
    ('role "', "28000"),
    ("does not exist", "3D000"),
    ("recovery is in progress", "25006"),
    ("session is read-only", "25006"),
    ("remaining connection slots", "53300"),
    ("the database system is starting up", "57P03"),
    ("No space left on device", "53100"),
)
"""States by words in errors of connecting, which carry none."""


class TimedConnection(DriverConnection[Any]):
    """A connection that gives up a server that does not answer within `TIMEOUT_S`."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        begin = time.monotonic()
        try:
            return super().wait(gen, interval, TIMEOUT_S)
        except psycopg.Error:
            if time.monotonic() - begin < TIMEOUT_S:
                raise
            self.close()  # what was asked may still be answered: nothing else may be asked here
            raise psycopg.OperationalError(f"no answer within {TIMEOUT_S:g} s") from None


class PostgreSQL(dialect.Dialect):
    """PostgreSQL 13 or newer; `url` is libpq's, so that it may name several hosts."""

    title = "PostgreSQL"
    driver: Any = psycopg
    now = "EXTRACT(EPOCH FROM clock_timestamp())::float8"
    # A promoted standby continues on another timeline, a dump is restored under another identifier.
    # A direct connection has noted the identifier, which the server reads from a file each time.
    server = (
        "COALESCE(NULLIF(current_setting('gpu_manager.server', true), ''), "
        "(SELECT system_identifier::text FROM pg_control_system())) || '/' "
        "|| substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)"
    )
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
    wake = "SELECT " + WAKE.format(token=":token")
    unsynced = "SELECT set_config('synchronous_commit', 'off', true)"
    json = POSTGRESQL
    schema: str | None = SCHEMA

    def __init__(self, url: str) -> None:
        try:
            options = conninfo_to_dict(url)
        except psycopg.Error as error:
            reason = re.sub(r'"[^"]*"', "…", " ".join(str(error).split()))  # it may quote the password
            raise SettingsError(f"wrong PostgreSQL URL {redact(url)!r}: {reason}") from None
        place = url.partition("://")[2].partition("?")[0]
        if place.count("@") > 1 or "@" in place.partition("/")[2]:  # libpq's errors would quote a part of it
            raise SettingsError(
                f"wrong PostgreSQL URL {redact(url)!r}: write @ and / in its password as %40 and %2F"
            )
        options.setdefault("connect_timeout", str(math.ceil(TIMEOUT_S)))  # 0 would be no limit
        options.setdefault("application_name", "gpu-manager")
        options["client_encoding"] = "utf8"  # the database's own may be SQL_ASCII, which leaves bytes
        if "," in str(options.get("host", "")):
            options.setdefault("target_session_attrs", "read-write")
        self._conninfo = make_conninfo("", **options)

    def engine(self) -> Engine:
        return create_engine(
            "postgresql+psycopg://", creator=self.connect, **dialect.POOL, pool_timeout=TIMEOUT_S
        )

    def connect(self) -> TimedConnection:
        """Return a connection of the driver."""
        connection = TimedConnection.connect(self._conninfo, autocommit=True)
        if is_pooled(connection):
            connection.prepare_threshold = None
        else:
            connection.execute(
                "SELECT set_config('gpu_manager.server', system_identifier::text, false), "
                f"set_config('lock_timeout', '{dialect.LOCK_WAIT_S}s', false), "
                f"set_config('idle_in_transaction_session_timeout', '{dialect.IDLE_S}s', false) "
                "FROM pg_control_system()"
            )
        return connection

    @classmethod
    def quoted(cls, table: str) -> str:
        return f'{SCHEMA}."{table}"'

    def commit(self, connection: dialect.Connection, commit: dialect.Commit) -> tuple[bool, float]:
        values = commit.values
        changes = len(commit.changes)
        if changes > MAX_LISTED:
            changes = MANY
            # The driver takes long to write arrays; no line of JSON has a line break inside.
            values["times"] = ",".join(repr(at) for at, _ in commit.changes)
            values["bodies"] = "\n".join(body for _, body in commit.changes)
        statement = _statement(
            dialect.update(commit), changes, len(commit.once), len(commit.jobs), commit.frees
        )
        row = dialect.execute(self, connection, statement, values).fetchone()
        return bool(row[0]), row[1]

    def replacing(self, row: str, key: Sequence[str], values: Sequence[str]) -> str:
        sets = ", ".join(f"{name} = excluded.{name}" for name in values)
        return f"INSERT INTO {row} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {sets}"

    def waiter(self, token: str, pace: dialect.Pace, lend: Callable[[], dialect.Connection]) -> Listener:
        return Listener(token, pace, lend)

    def examine(self, connection: dialect.Connection) -> list[tuple[bool, str]]:
        row = dialect.execute(
            self,
            connection,
            "SELECT current_setting('server_version_num')::int, current_setting('server_version'), "
            "pg_is_in_recovery(), current_setting('synchronous_commit'), current_setting('fsync'), "
            "current_setting('default_transaction_isolation'), current_setting('server_encoding')",
            {},
        ).fetchone()
        number, version, is_standby, synchronous, fsync, isolation, encoding = row
        driver: Any = connection.driver_connection
        pooled = is_pooled(driver)
        found = [(number >= 130_000, f"PostgreSQL {version}; 13 or newer is needed")]
        if is_standby:
            found.append((False, _STATES["25006"][1]))
        if encoding not in ("UTF8", "SQL_ASCII"):
            found.append((False, _STATES["22P05"][1]))
        if synchronous == "off" or fsync == "off":
            found.append((False, f"synchronous_commit={synchronous}, fsync={fsync}: a crash loses commits"))
        if isolation != "read committed":
            found.append((True, f"default isolation {isolation}: more commits are tried again"))
        found.append((True, "behind a pooler: waiters poll" if pooled else "direct: waiters are woken"))
        return found

    def grant(self, connection: dialect.Connection, rights: str, table: str) -> str:
        [user] = dialect.execute(self, connection, "SELECT quote_ident(current_user)", {}).fetchone()
        where = table or f"ALL TABLES IN SCHEMA {SCHEMA}"
        return f"GRANT USAGE ON SCHEMA {SCHEMA} TO {user}; GRANT {rights} ON {where} TO {user};"

    def explain(self, error: BaseException) -> dialect.Fault:
        words = " ".join(str(error).split())
        state = getattr(error, "sqlstate", None)
        if state in {None, "55000"}:  # the latter of a standby, asked who holds the data
            state = next((known for phrase, known in _WORDS if phrase in words), "")
        if state in _STATES:
            return dialect.Fault(*_STATES[state])
        if state.startswith("08") or (not state and isinstance(error, psycopg.OperationalError)):
            return dialect.Fault("away", f"cannot be reached ({words})")
        return dialect.Fault("refused", f"it refused the operation ({words})")


class Listener(dialect.Poller):
    """A waiter that the release of the lock wakes, by a connection of its own while it waits.

    It begins as a poller, and listens once few are before it. Behind a pooler it goes on polling.
    """

    def __init__(self, token: str, pace: dialect.Pace, lend: Callable[[], dialect.Connection]) -> None:
        super().__init__(pace)
        self._lend = lend
        self._channel = f"gpu_manager_{token}"
        self._listens_at = time.monotonic() + LISTEN_AFTER_S
        self._connection: dialect.Connection | None = None

    def wait(self, seconds: float, ahead: int) -> bool:
        if self._connection is not None:
            return self._listen(min(seconds, dialect.POLL_S))
        if time.monotonic() < self._listens_at or ahead > LISTEN_BEHIND:
            return super().wait(seconds, ahead)
        self._listens_at = math.inf
        try:
            connection = self._lend()
        except Exception:  # there is none: it goes on polling, and its next look says if the server is away
            return False
        driver: Any = connection.driver_connection
        if driver.prepare_threshold is None:  # a pooler is in between
            connection.close()
            return False
        try:
            driver.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except psycopg.Error:  # the server is away: it goes on polling
            connection.invalidate()
            connection.close()
        else:
            self._connection = connection
        return False  # the lock may have been handed on before

    def _listen(self, seconds: float) -> bool:
        assert self._connection is not None
        driver: Any = self._connection.driver_connection
        try:
            return any(
                notice.channel == self._channel for notice in driver.notifies(timeout=seconds, stop_after=1)
            )
        except psycopg.Error:  # the server is away: the waiter's next look says so
            time.sleep(seconds)
            return False

    def close(self) -> None:
        if self._connection is None:
            return
        driver: Any = self._connection.driver_connection
        try:
            driver.execute("UNLISTEN *")
        except psycopg.Error:
            self._connection.invalidate()
        except BaseException:
            self._connection.invalidate()
            raise
        finally:
            self._connection.close()


def is_pooled(connection: DriverConnection[Any]) -> bool:
    """Return whether a pooler is in between, which gives every connection a process id of its own making."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return bool(row[0] != connection.info.backend_pid)


@lru_cache(maxsize=64)
def _statement(update: str, changes: int, keys: int, jobs: int, frees: bool) -> str:
    """Return the commit as one statement: it writes what hangs on the compare-and-set, and tells the time.

    `changes` is their number, or `MANY`.
    """
    parts = [f"done AS ({update} RETURNING version, lock_token)"]
    if changes:
        entries = ", ".join(
            f"(CAST(:at_{number} AS float8), CAST(:body_{number} AS text), {number + 1})"
            for number in range(changes)
        )
        of_any_number = (
            "unnest(CAST(string_to_array(:times, ',') AS float8[]), string_to_array(:bodies, E'\\n')) "
            "WITH ORDINALITY"
        )
        parts.append(f"""written AS (
            INSERT INTO {{change}} (namespace, version, at, commit_id, body)
            SELECT :namespace, CAST(:version AS bigint) + entry.number, entry.at, :commit_id, entry.body
            FROM done, {f"(VALUES {entries})" if entries else of_any_number} AS entry (at, body, number))""")
    if keys:
        rows = (
            f"(CAST(:caller_{number} AS text), CAST(:name_{number} AS text), CAST(:text_{number} AS text))"
            for number in range(keys)
        )
        parts.append(f"""kept AS (
            INSERT INTO {{once}} (namespace, caller, name, answer, expires_at)
            SELECT :namespace, caller, name, answer, {{now}} + {KEEP_S}
            FROM done, (VALUES {", ".join(rows)}) AS key (caller, name, answer)
            ON CONFLICT (namespace, caller, name)
            DO UPDATE SET answer = excluded.answer, expires_at = excluded.expires_at)""")
    if jobs:
        rows = (
            f"(CAST(:job_name_{number} AS text), CAST(:job_caller_{number} AS text), "
            f"CAST(:job_text_{number} AS text), CAST(:job_keep_s_{number} AS float8))"
            for number in range(jobs)
        )
        parts.append(f"""jobs AS (
            INSERT INTO {{job}} AS old {dialect.JOB_COLUMNS}
            SELECT :namespace, name, caller, body, {{now}} + keep_s
            FROM done, (VALUES {", ".join(rows)}) AS entry (name, caller, body, keep_s)
            {dialect.UPSERT_JOB})""")
    if frees:
        parts.append("gone AS (DELETE FROM {lock} l USING done WHERE l.token = done.lock_token)")
    told = f"EXISTS (SELECT FROM done), {{now}}{WOKEN if frees else ''}"
    return f"WITH {', '.join(parts)} SELECT {told}"
