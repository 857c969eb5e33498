"""SQLite: one file of one machine, for a service and its commands without any server."""

from __future__ import annotations

import math
import os
import random
import sqlite3
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from resource_manager.errors import SettingsError, redact
from resource_manager.storage.once import KEEP_S
from resource_manager.storage.sql.dialect import (
    ENTER,
    IS_CURRENT,
    JOB_COLUMNS,
    LEAVE_NEXT,
    POOL,
    UPSERT_JOB,
    Commit,
    Connection,
    Dialect,
    Fault,
    execute,
    job_values,
    update,
)
from resource_manager.storage.sql.tables import SCHEMA
from resource_manager.storage.sql.views import SQLITE

_spread = random.Random()
"""Of its own, so that waiting changes no random numbers of the program."""

BUSY_S = 5.0

LOG = "log"
"""Key in the `info` of a connection: the files of its write-ahead log, as it opened them."""

_LOG_REMOVED = "its -wal or -shm was removed while it was open: end all processes that use it"

NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2",
    "ocfs2", "beegfs", "gpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone",
    "fuse.gcsfuse", "fuse.nfs", "orangefs", "virtiofs",
}  # fmt: skip
"""File systems on which a write-ahead log is not safe: other machines do not share its memory and locks."""


class StillLockedError(sqlite3.OperationalError):
    """A lock that another process has held for `BUSY_S`."""


class PatientCursor(sqlite3.Cursor):
    """A cursor that waits for the lock of another; SQLite itself sleeps for a few commits between tries."""

    def execute(self, *statement: Any) -> PatientCursor:
        ends_at = math.inf
        while True:
            try:
                return super().execute(*statement)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or self.connection.in_transaction:
                    raise
                now = time.monotonic()
                ends_at = min(ends_at, now + BUSY_S)
                if now > ends_at:
                    raise StillLockedError(str(error)) from error
            time.sleep(_spread.uniform(0.0001, 0.0004))


class PatientConnection(sqlite3.Connection):
    """A connection whose every cursor waits."""

    def cursor(self, *_: Any) -> Any:
        return super().cursor(PatientCursor)

    def execute(self, *statement: Any) -> PatientCursor:
        cursor: PatientCursor = self.cursor()  # that of sqlite3 makes a cursor of its own kind
        return cursor.execute(*statement)


class SQLite(Dialect):
    """SQLite with a write-ahead log, each commit forced to the disk."""

    title = "SQLite"
    driver: Any = sqlite3
    now = "now_s()"
    begin = "BEGIN IMMEDIATE"
    json = SQLITE
    lock_row = ""
    prefix = f"{SCHEMA}_"

    def __init__(self, url: str) -> None:
        try:
            self._url = make_url(url)
        except (ArgumentError, ValueError):
            raise SettingsError(f"wrong SQLite URL {redact(url)!r}: not sqlite:////path/to/file") from None
        name = self._url.database
        if self._url.host or not name or name == ":memory:" or "?" in url:
            raise SettingsError(
                f"wrong SQLite URL {redact(url)!r}: it names a file and at most a namespace, as in "
                "sqlite:////var/lib/gpu-manager/state.db"
            )
        self.path = Path(name)

    def engine(self) -> Engine:
        refuse_network(self.path)
        engine = create_engine(
            self._url,
            **POOL,
            pool_timeout=BUSY_S,
            connect_args={"timeout": 0, "check_same_thread": False, "factory": PatientConnection},
        )
        event.listen(engine, "connect", _prepare)
        return engine

    @staticmethod
    def in_style(statement: str) -> str:
        return statement

    @classmethod
    def quoted(cls, table: str) -> str:
        return f'"{cls.prefix}{table}"'

    def commit(self, connection: Connection, commit: Commit) -> tuple[bool, float]:
        driver: Any = connection.driver_connection
        values = commit.values
        try:
            driver.execute(self.begin)
            if not all(_is_file(*each) for each in connection.info[LOG]):
                raise sqlite3.DatabaseError(_LOG_REMOVED)  # nobody else would read what is written there
            done: bool = execute(self, connection, update(commit), values).rowcount == 1
            if done:
                self._write(connection, commit, values)
            driver.execute("COMMIT")
        finally:
            if driver.in_transaction:
                driver.rollback()
        return done, time.time()

    def _write(self, connection: Connection, commit: Commit, values: Mapping[str, Any]) -> None:
        def write(statement: str, **own: Any) -> None:
            execute(self, connection, statement, {"namespace": commit.namespace, **own})

        if commit.frees:
            write(LEAVE_NEXT)
        for version, (at, body) in enumerate(commit.changes, commit.version + 1):
            write(
                "INSERT INTO {change} (namespace, version, at, commit_id, body) "
                "VALUES (:namespace, :version, :at, :commit_id, :body)",
                version=version,
                at=at,
                commit_id=commit.commit_id,
                body=body,
            )
        for caller, name, answer in commit.once:
            write(
                "REPLACE INTO {once} (namespace, caller, name, answer, expires_at) "
                f"VALUES (:namespace, :caller, :name, :answer, {{now}} + {KEEP_S})",
                caller=caller,
                name=name,
                answer=answer,
            )
        for number in range(len(commit.jobs)):
            row = f"{JOB_COLUMNS} VALUES (:namespace, {job_values(number)})"
            execute(self, connection, f"INSERT INTO {{job}} AS old {row} {UPSERT_JOB}", values)

    def enter(self, connection: Connection, values: Mapping[str, Any]) -> None:
        driver: Any = connection.driver_connection
        driver.execute("PRAGMA synchronous = NORMAL")
        try:
            execute(self, connection, ENTER, values)
        finally:
            driver.execute("PRAGMA synchronous = FULL")

    def examine(self, connection: Connection) -> list[tuple[bool, str]]:
        mode = execute(self, connection, "PRAGMA journal_mode", {}).fetchone()[0]
        found = [
            (sqlite3.sqlite_version_info >= (3, 35), f"SQLite {sqlite3.sqlite_version}; 3.35 is needed"),
            (mode == "wal", f"journal mode {mode}; wal is needed"),
        ]
        damage = execute(self, connection, "PRAGMA quick_check(1)", {}).fetchone()[0]
        if damage != "ok":
            found.append((False, f"the file is damaged: {' '.join(damage.split())}"))
        return found

    def grant(self, connection: Connection, rights: str, table: str) -> str:
        return f"give this user the right to write {self.path} and its folder"

    def explain(self, error: BaseException) -> Fault:
        words = " ".join(str(error).split())
        if "no such table" in words:
            return Fault("missing", "its tables are missing: run gpu-manager store create")
        if "no such column" in words or "has no column" in words:
            return Fault("corrupt", "its tables are of another version of this software")
        if isinstance(error, StillLockedError):
            return Fault("locked", f"another process held its lock for {BUSY_S:g} s")
        if "database is locked" in words or "table is locked" in words:
            return Fault("busy", "other processes changed it at the same time")
        if words == _LOG_REMOVED:
            return Fault("corrupt", words)
        if "disk is full" in words:
            return Fault("full", "its disk is full")
        if "readonly" in words:
            return Fault("rights", "the file or its folder is read-only for this user")
        if "unable to open" in words:
            folder = self.path.parent
            reason = (
                "this user may not read and write it" if folder.is_dir() else f"there is no folder {folder}"
            )
            return Fault("rights", f"cannot be opened: {'it is a folder' if self.path.is_dir() else reason}")
        if "not a database" in words or "malformed" in words:
            return Fault("corrupt", "it is no SQLite database, or damaged: move it away and restore a backup")
        return Fault("away", f"it refused the operation ({words})")


def _prepare(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
    connection.create_function("now_s", 0, time.time)
    for pragma in ("journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # opens the log
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    opened, *log = [(os.stat(name), name) for name in (path, f"{path}-wal", f"{path}-shm")]
    record.info[IS_CURRENT] = partial(_is_file, *opened)
    record.info[LOG] = log


def _is_file(opened: os.stat_result, path: str) -> bool:
    """Return whether the path leads to the opened file: else others grant on the one that took its place."""
    try:
        return os.path.samestat(opened, os.stat(path))
    except OSError:
        return False


def refuse_network(path: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Raise `SettingsError` if the file is on a network file system."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return  # only Linux tells
    place = path.absolute().parent.resolve()
    found: tuple[int, str] = (-1, "")
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        folder = Path(point.encode().decode("unicode_escape"))
        if (place == folder or folder in place.parents) and len(folder.parts) >= found[0]:
            # The last mount at a point hides those before it.
            found = len(folder.parts), kind
    if found[1] in NETWORK_FILE_SYSTEMS:
        raise SettingsError(
            f"{path} is on a network file system ({found[1]}), where SQLite loses data: "
            "choose a local file, or a postgresql:// or mysql:// store"
        )
