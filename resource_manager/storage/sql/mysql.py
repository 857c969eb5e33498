"""MySQL and MariaDB through PyMySQL: a commit is one packet, on MariaDB one prepared block."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pymysql
from pymysql.constants import CLIENT, ER
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from resource_manager.errors import SettingsError, redact
from resource_manager.storage.once import KEEP_S
from resource_manager.storage.sql.dialect import (
    IDLE_S,
    JOB_COLUMNS,
    LEAVE_NEXT,
    LOCK_WAIT_S,
    POOL,
    Commit,
    Connection,
    Dialect,
    Fault,
    execute,
    job_values,
    update,
    written,
)
from resource_manager.storage.sql.views import MYSQL

TIMEOUT_S = 5

SQL_MODE = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
"""Of each session: by a server's own, an empty text may be NULL, or a statement be of another language."""

MAX_PREPARED = 4
"""Changes and keys beyond which a commit is not prepared: a server keeps a limited number of statements."""

_FULL = Fault("full", "its disk is full")
_READ_ONLY = Fault("read-only", "it is read-only, as a replica is: connect to the primary")
_NO_RIGHTS = Fault(
    "rights", "its user lacks rights: grant those in docs/stores.md, or run gpu-manager store check"
)
_CODES: dict[Fault, tuple[int, ...]] = {
    Fault("rights", "it refused the login: check user and password in the URL"): (1045, 1698),
    Fault("rights", "it refuses logins from this host: create the user for this host, too"): (1130,),
    _NO_RIGHTS: (1044, 1142, 1143, 1227, 1370),
    Fault("refused", "there is no such database: create it, or check its name in the URL"): (1049,),
    Fault("refused", "what it was sent is larger than it takes: raise max_allowed_packet"): (1153,),
    Fault("missing", "its tables are missing: run gpu-manager store create"): (1146,),
    Fault("corrupt", "its tables are of another version of this software"): (1054,),
    _FULL: (3, 28, 1021, 1026, 1114),
    Fault("away", "it has no connection left: raise max_connections"): (1040,),
    Fault("away", "its user has no connection left: raise max_user_connections"): (1203,),
    Fault("away", "it is shutting down"): (1053,),
    Fault("away", "it closed the connection"): (1927, 4031),
    Fault("locked", "another session keeps its tables locked: see SHOW PROCESSLIST"): (1205,),
    Fault("busy", "its transactions disturbed each other"): (1020, 1213, 1243),
    _READ_ONLY: (1290, 1792, 1836),
}
_FAULTS = {code: fault for fault, codes in _CODES.items() for code in codes}


class MySQL(Dialect):
    """MySQL 8.0 or MariaDB 10.6, or newer; the database in the URL holds nothing else."""

    title = "MySQL"
    driver: Any = pymysql
    now = "(UNIX_TIMESTAMP(NOW(6)) + 0e0)"
    begin = "START TRANSACTION"
    json = MYSQL

    def __init__(self, url: str) -> None:
        try:
            self._url = make_url(url).set(drivername="mysql+pymysql")
        except (ArgumentError, ValueError):
            raise SettingsError(
                f"wrong MySQL URL {redact(url)!r}: not mysql://user:password@host:port/database"
            ) from None
        if not self._url.database:
            raise SettingsError(
                f"wrong MySQL URL {redact(url)!r}: it names no database, as in mysql://user@host/gpu_manager"
            )
        if "@" in (self._url.host or ""):  # the driver's error would quote this part of the password
            raise SettingsError(f"wrong MySQL URL {redact(url)!r}: write @ in its password as %40")
        self.database = self._url.database

    def engine(self) -> Engine:
        return create_engine(
            self._url,
            **POOL,
            pool_timeout=TIMEOUT_S,
            connect_args={
                "connect_timeout": TIMEOUT_S,
                "read_timeout": TIMEOUT_S,
                "write_timeout": TIMEOUT_S,
                "charset": "utf8mb4",
                "client_flag": CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
                "init_command": f"SET time_zone = '+00:00', sql_mode = '{SQL_MODE}', "
                f"innodb_lock_wait_timeout = {LOCK_WAIT_S}, lock_wait_timeout = {LOCK_WAIT_S} "
                f"/*M! , idle_transaction_timeout = {IDLE_S} */; "  # MySQL has none
                "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            },
        )

    @classmethod
    def quoted(cls, table: str) -> str:
        return f"`{table}`"

    def commit(self, connection: Connection, commit: Commit) -> tuple[bool, float | None]:
        # One packet: a client that sleeps in the middle of a commit holds nobody up.
        driver: Any = connection.driver_connection
        carry_out = _as_block if has_blocks(driver) else _as_statements
        try:
            done = carry_out(self, connection, commit)
        except pymysql.Error as error:
            if self.explain(error).kind != "away":
                driver.rollback()
            raise
        return done, None

    def quoted_column(self, name: str) -> str:
        return f"`{name}`"

    def examine(self, connection: Connection) -> list[tuple[bool, str]]:
        settings = "SELECT VERSION(), @@GLOBAL.read_only, @@GLOBAL.innodb_flush_log_at_trx_commit"
        version, read_only, flush = execute(self, connection, settings, {}).fetchone()
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        is_mariadb = "mariadb" in version.lower()
        enough = numbers >= ((10, 6) if is_mariadb else (8, 0))
        name = "MariaDB" if is_mariadb else "MySQL"
        found = [(enough, f"{name} {version}; MySQL 8.0 or MariaDB 10.6, or newer, is needed")]
        if read_only:
            found.append((False, _READ_ONLY.text))
        if flush != 1:
            found.append((False, f"innodb_flush_log_at_trx_commit={flush}: a crash loses commits"))
        airflow = execute(self, connection, "SHOW TABLES LIKE 'dag\\_run'", {}).fetchone()
        if airflow is not None:
            found.append((False, f"the database {self.database} is Airflow's: use one of its own"))
        return found

    def grant(self, connection: Connection, rights: str, table: str) -> str:
        [account] = execute(self, connection, "SELECT CURRENT_USER()", {}).fetchone()
        user, _, host = account.rpartition("@")
        return f"GRANT {rights} ON `{self.database}`.{table or '*'} TO '{user}'@'{host}';"

    def explain(self, error: BaseException) -> Fault:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        words = " ".join(str(error.args[-1] if error.args else error).split())
        if "No space left" in words or "Disk full" in words or "Errcode: 28" in words:
            return _FULL
        if code in _FAULTS:
            return _FAULTS[code]
        if 2000 <= code < 3000 or isinstance(error, pymysql.InterfaceError) or code == 0:
            return Fault("away", f"cannot be reached ({words})")
        return Fault("refused", f"it refused the operation ({code}: {words})")


def has_blocks(driver: Any) -> bool:
    """Return whether the server takes a block of statements outside of a procedure, as MariaDB does."""
    return "MariaDB" in driver.get_server_info()


def _as_block(dialect: MySQL, connection: Connection, commit: Commit) -> bool:
    """Execute the commit as one statement, parsed once a connection; MySQL has no blocks."""
    block = _block(update(commit), len(commit.changes), len(commit.once), len(commit.jobs), commit.frees)
    values = commit.values | {"stored_id": commit.commit_id}
    if len(commit.changes) + len(commit.once) + len(commit.jobs) > MAX_PREPARED:
        return bool(execute(dialect, connection, block, values).rowcount > 0)
    text, parameters = _prepared(block)
    prepared: dict[str, str] = connection.info.setdefault("prepared", {})
    name = prepared.get(text)
    cursor = connection.cursor()
    if name is None:
        name = f"commit_{len(prepared)}"
        try:
            cursor.execute(f"PREPARE {name} FROM %s", (text,))
        except pymysql.Error as error:
            if error.args[0] != ER.MAX_PREPARED_STMT_COUNT_REACHED:  # by anybody on that server
                raise
            return bool(execute(dialect, connection, block, values).rowcount > 0)
        prepared[text] = name
    try:
        cursor.execute(f"EXECUTE {name} USING {parameters}", values)
    except pymysql.Error:
        prepared.clear()  # it may be one of a pooler, whose server connection is another now
        raise
    return bool(cursor.rowcount > 0)


@lru_cache(maxsize=64)
def _block(update: str, changes: int, keys: int, jobs: int, frees: bool) -> str:
    """Return the commit as a block, which goes back where it is unknown how many rows were changed."""
    then = "; ".join([*_writes(_listed, changes, keys, jobs, frees), "COMMIT"])
    return (
        f"BEGIN NOT ATOMIC START TRANSACTION; {update}; "
        f"IF ROW_COUNT() = 1 THEN {then}; ELSE ROLLBACK; END IF; END"
    )


@lru_cache(maxsize=64)
def _prepared(block: str) -> tuple[str, str]:
    """Return the text to prepare, and the list of its parameters in the driver's style."""
    text = written(MySQL, block)
    names = r"%\(\w+\)s"
    return re.sub(names, "?", text).replace("%%", "%"), ", ".join(re.findall(names, text))


def _as_statements(dialect: MySQL, connection: Connection, commit: Commit) -> bool:
    # Another id for each try, so that none hangs on an earlier one whose answer was lost.
    values = commit.values | {"stored_id": commit.commit_id, "commit_id": os.urandom(12).hex()}
    numbers = len(commit.changes), len(commit.once), len(commit.jobs)
    statements = _statements(update(commit), *numbers, commit.frees)
    cursor = execute(dialect, connection, statements, values)
    cursor.nextset()
    done = bool(cursor.rowcount == 1)
    while cursor.nextset():
        pass
    return done


@lru_cache(maxsize=64)
def _statements(update: str, changes: int, keys: int, jobs: int, frees: bool) -> str:
    """Return the commit as statements; what follows hangs on the compare-and-set of this very try.

    ROW_COUNT() would not do: it is -1 where the client went away meanwhile, and COMMIT follows all the same.
    """
    statements = ["START TRANSACTION", update, *_writes(_selected, changes, keys, jobs, frees), "COMMIT"]
    return "; ".join(statements)


def _writes(
    source: Callable[[Sequence[str]], str], changes: int, keys: int, jobs: int, frees: bool
) -> list[str]:
    """Return the statements after the compare-and-set; `source` is what the rows come from."""
    statements = [LEAVE_NEXT] if frees else []
    if changes:
        rows = [
            f":namespace, :version + {number + 1}, :at_{number}, :stored_id, :body_{number}"
            for number in range(changes)
        ]
        statements.append(f"INSERT INTO {{change}} (namespace, version, at, commit_id, body) {source(rows)}")
    if keys:
        rows = [
            f":namespace, :caller_{number}, :name_{number}, :text_{number}, {{now}} + {KEEP_S}"
            for number in range(keys)
        ]
        columns = "namespace, caller, name, answer, expires_at"
        statements.append(f"REPLACE INTO {{once}} ({columns}) {source(rows)}")
    if jobs:
        rows = [f":namespace, {job_values(number)}" for number in range(jobs)]
        statements.append(
            f"INSERT INTO {{job}} {JOB_COLUMNS} {source(rows)} ON DUPLICATE KEY UPDATE "
            "expires_at = VALUES(expires_at), "
            "caller = CASE WHEN VALUES(body) = '' THEN {job}.caller ELSE VALUES(caller) END, "
            "body = CASE WHEN VALUES(body) = '' THEN {job}.body ELSE VALUES(body) END"
        )
    return statements


def _listed(rows: Sequence[str]) -> str:
    return f"VALUES {', '.join(f'({row})' for row in rows)}"


def _selected(rows: Sequence[str]) -> str:
    """Select the rows where the compare-and-set of this very try was made, else none."""
    of_this = "FROM {state} WHERE namespace = :namespace AND commit_id = :commit_id"
    return " UNION ALL ".join(f"SELECT {row} {of_this}" for row in rows)
