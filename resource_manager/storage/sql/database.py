"""Connections to a database from a URL, retries, and the driver's errors in plain words."""

from __future__ import annotations

import math
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from resource_manager import errors
from resource_manager.storage.locks import ThreadMutex
from resource_manager.storage.outage import outage

try:
    from sqlalchemy import Engine, MetaData, text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.exc import TimeoutError as PoolTimeoutError
except ModuleNotFoundError as error:
    raise errors.SettingsError(f"SQL stores need {error.name}: {errors.how_to_install('sql')}") from error
except ImportError as error:
    raise errors.SettingsError(
        "SQL stores need SQLAlchemy 2, and an older one is installed, as Airflow 3.0 requires: "
        "use Airflow 3.1 or newer, a redis:// URL, or the URL of the service"
    ) from error

from resource_manager.storage.sql import tables
from resource_manager.storage.sql.dialect import (
    IS_CURRENT,
    Connection,
    Dialect,
    Fault,
    Pace,
    Poller,
    execute,
)
from resource_manager.storage.sql.views import ALLOCATIONS, SERVERS, Views

_spread = random.Random()
"""Of its own, so that waiting changes no random numbers of the program."""

DEFAULT_NAMESPACE = "gpu_manager"

MAX_IDLE = 4
"""Connections kept at hand, as the pool takes as long to lend one as a driver to ask."""

MAX_RETRIES_AWAY = 2
MAX_RETRIES_BUSY = 12
"""How often a transaction is tried again while the server is away, or after others disturbed it."""

MAX_AWAY_S = 6.0
"""Time after which a server is not asked again: one that does not answer is asked twice, for 5 s each."""

T = TypeVar("T")


class Database:
    """A pool of connections, its address without the password, and the namespace; connects on first use.

    Raises `SettingsError` for a wrong URL or a missing driver. Not shared with forked children: each gets
    connections of its own.
    """

    def __init__(self, url: str) -> None:
        base, _, query = url.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        self.namespace = options.pop("namespace", DEFAULT_NAMESPACE)
        if not re.fullmatch(rf"[\w.:-]{{1,{tables.MAX_NAMESPACE}}}", self.namespace, re.ASCII):
            raise errors.SettingsError(
                f"wrong store URL {errors.redact(url)!r}: a namespace may have up to {tables.MAX_NAMESPACE} "
                f"letters, digits and _.:- only, not {self.namespace!r}"
            )
        self.dialect = _dialect(f"{base}?{urlencode(options, quote_via=quote)}" if options else base)
        self.address = f"{self.dialect.title} at {errors.redact(url)}"
        self._url = url
        self._guard = threading.Lock()
        self._creating = threading.Lock()
        self._engine: Engine | None = None
        self._idle: list[Connection] = []
        _open.add(self)
        self._created = False
        self._away_at = -math.inf
        self.line = _line_of(url)
        self._pace = Pace()
        self.contended = False
        """Whether the last claim on the lock had to wait: then the next one stands in line at once."""

    @property
    def engine(self) -> Engine:
        with self._guard:
            if self._engine is None:
                self._engine = self.dialect.engine()
                weakref.finalize(self, _dispose, self._engine, self._idle)
            return self._engine

    @property
    def tables(self) -> MetaData:
        return tables.metadata(schema=self.dialect.schema, prefix=self.dialect.prefix)

    def run(self, work: Callable[[Connection], T]) -> T:
        """Return the answer of `work` on a connection, where each statement commits by itself.

        It is called again where the server was away or another transaction disturbed it, so it must lead to
        the same result if it was done before. Missing tables are created. Raises
        `StoreUnavailableError`, `StoreFullError`, `StoreRefusedError` and `CorruptStateError`.
        """
        away = busy = 0
        begin = time.monotonic()
        while True:
            try:
                return self._lend(work)
            except PoolTimeoutError as error:
                raise outage(f"{self.address}: all connections of this process are in use") from error
            except self.dialect.driver.Error as error:
                fault = self.dialect.explain(error)
                if isinstance(error, self.dialect.driver.IntegrityError):
                    fault = Fault("busy", _words(error))  # another client wrote the same row first
                if fault.kind == "missing" and not self._created:
                    self.create()
                    continue
                if fault.kind == "busy" and busy < MAX_RETRIES_BUSY:
                    busy += 1
                elif fault.kind in {"away", "read-only"} and away < MAX_RETRIES_AWAY:
                    away += 1
                    if time.monotonic() - begin > MAX_AWAY_S:
                        raise self._error(fault) from error
                else:
                    raise self._error(fault) from error
            time.sleep(_spread.uniform(0.2, 1.0) * min(0.02 * 2 ** (4 * away + busy), 0.25))

    def connection(self) -> Connection:
        """Return a connection of the pool, none to what is not there any more; `close` gives it back."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._new_connection()
            since = connection.info.setdefault("since", time.monotonic())
            if since >= self._away_at and connection.info.get(IS_CURRENT, lambda: True)():
                return connection
            connection.invalidate()
            connection.close()

    def _new_connection(self) -> Connection:
        try:
            return self.engine.raw_connection()
        except DBAPIError as error:  # of what SQLAlchemy asks on its first connection
            raise error.orig or error from error
        except (TypeError, ValueError, OSError) as error:  # the server's own are the driver's
            raise errors.SettingsError(
                f"{self.address}: an option of its URL is wrong ({_words(error)})"
            ) from error

    def _lend(self, work: Callable[[Connection], T]) -> T:
        """Return the answer of `work` on a connection, which is closed where it may not be used again."""
        connection = self.connection()
        try:
            return work(connection)
        except self.dialect.driver.Error as error:
            if self.dialect.explain(error).kind in {"away", "read-only"}:
                connection.invalidate()
                self._away_at = time.monotonic()
            raise
        except Exception:
            raise
        except BaseException:  # an interrupt, perhaps in the middle of an answer
            connection.invalidate()
            raise
        finally:
            if connection.is_valid and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def write(self, work: Callable[[Connection], T]) -> T:
        """Return the answer of `work` in one transaction of several statements; else as `run`."""

        def transaction(connection: Connection) -> T:
            self.execute(connection, self.dialect.begin)
            try:
                answer = work(connection)
                self.execute(connection, "COMMIT")
            except Exception:
                with suppress(self.dialect.driver.Error):
                    connection.rollback()
                raise
            return answer

        return self.run(transaction)

    def execute(self, connection: Connection, statement: str, **values: Any) -> Any:
        """Execute a statement with the names of tables in the place of `{state}` and so on, and with the
        parameters `:namespace` and `values`; return the driver's cursor.
        """
        return execute(self.dialect, connection, statement, {"namespace": self.namespace, **values})

    def put(
        self, connection: Connection, table: str, key: Mapping[str, Any], keep_s: float, **values: Any
    ) -> None:
        """Keep these values for so long as the row of that key, in the place of one that is there."""
        columns = ("namespace", *key, *values)
        row = (
            f"{{{table}}} ({', '.join(columns)}, expires_at) "
            f"VALUES ({', '.join(f':{name}' for name in columns)}, {{now}} + :keep_s)"
        )
        statement = self.dialect.replacing(row, ("namespace", *key), (*values, "expires_at"))
        self.execute(connection, statement, **key, **values, keep_s=keep_s)

    def row(self, statement: str, **values: Any) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.run(
            lambda connection: self.execute(connection, statement, **values).fetchone()
        )
        return row

    def rows(self, statement: str, **values: Any) -> list[Any]:
        found = self.run(lambda connection: self.execute(connection, statement, **values).fetchall())
        return list(found)

    def change(self, statement: str, **values: Any) -> int:
        """Execute a statement that is a transaction of its own; return how many rows it changed."""
        return self.run(lambda connection: int(self.execute(connection, statement, **values).rowcount))

    def create(self) -> None:
        """Create the tables and views that are missing; raises `StoreUnavailableError` without the right."""
        with self._creating:
            for left in reversed(range(MAX_RETRIES_BUSY)):
                if self._created:
                    return
                try:
                    self._create_tables()
                except DBAPIError as error:
                    cause = error.orig or error
                    fault = self.dialect.explain(cause)
                    if left and fault.kind not in {"rights", "corrupt", "locked"}:
                        continue  # another client creates them at the same time, and has created more by now
                    if fault.kind in {"rights", "missing"}:
                        fault = Fault(
                            fault.kind,
                            "its tables are missing and this user may not create them: run gpu-manager store "
                            f"create as one who may ({_words(cause)})",
                        )
                    raise self._error(fault) from error
                self._created = True

    def _create_tables(self) -> None:
        with self.engine.connect() as connection:
            connection.exec_driver_sql(self.dialect.begin)
            try:
                if self.dialect.schema:
                    connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {self.dialect.schema}")
                self.tables.create_all(connection)
                names = ("snapshot", "change", ALLOCATIONS, SERVERS)
                for statement in Views(self.dialect.json, *map(self.dialect.quoted, names)).statements():
                    connection.execute(text(statement.replace(":", r"\:")))
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                connection.invalidate()  # and with it the transaction
                raise

    def waiter(self, token: str) -> Poller:
        """Return what a waiter for the lock sleeps on."""
        return self.dialect.waiter(token, self._pace, self.connection)

    def time(self) -> float:
        """Return the seconds since the epoch by the server's clock."""
        row = self.row("SELECT {now}")
        assert row is not None
        return float(row[0])

    def close(self) -> None:
        with self._guard:
            engine, self._engine = self._engine, None
        if engine is not None:
            _dispose(engine, self._idle)

    def forked(self) -> None:
        """Leave the parent's connections alone in a forked child."""
        self._guard, self._creating = threading.Lock(), threading.Lock()
        self.line = _line_of(self._url)
        if self._engine is not None:
            self._engine.dispose(close=False)
        self._idle.clear()

    def _error(self, fault: Fault) -> errors.StoreError:
        message = f"{self.address}: {fault.text}"
        if fault.kind == "corrupt":
            return errors.CorruptStateError(message)
        return outage(message, _OUTAGES.get(fault.kind, errors.StoreUnavailableError))


_OUTAGES = {"full": errors.StoreFullError, "rights": errors.StoreRefusedError}


class Line(ThreadMutex):
    """The threads of this process that want the lock of a namespace, and how often it went between them."""

    __slots__ = ("passes",)

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0


_lines: weakref.WeakValueDictionary[str, Line] = weakref.WeakValueDictionary()


def _line_of(url: str) -> Line:
    # By the whole URL: its query may name the server, as `host` and `service` do.
    return _lines.setdefault(url, Line())


def _dispose(engine: Engine, idle: list[Connection]) -> None:
    """Close all connections that nobody uses."""
    while idle:
        idle.pop().close()
    engine.dispose()


_open: weakref.WeakSet[Database] = weakref.WeakSet()


def _in_forked_child() -> None:
    _lines.clear()
    for database in list(_open):
        database.forked()


os.register_at_fork(after_in_child=_in_forked_child)


def _dialect(url: str) -> Dialect:
    scheme = url.partition("://")[0]
    try:
        if scheme == "postgresql":
            from resource_manager.storage.sql.postgresql import PostgreSQL

            return PostgreSQL(url)
        if scheme == "mysql":
            from resource_manager.storage.sql.mysql import MySQL

            return MySQL(url)
        from resource_manager.storage.sql.sqlite import SQLite

        return SQLite(url)
    except ImportError as error:  # psycopg's own, too, where it has no libpq
        missing = error.name or f"a driver that loads ({_words(error)})"
        raise errors.SettingsError(
            f"{scheme}:// stores need {missing}: {errors.how_to_install('sql')}"
        ) from error


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())
