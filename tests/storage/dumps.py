"""Dumps of a store, taken and brought back by the means of its server, which the manager does not see."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs

import redis

from resource_manager.storage import SQL_SCHEMES
from resource_manager.storage.sql.database import Database
from tests.sql_servers import Postgres

STATE_TABLES = ("state", "snapshot", "change")


def fail_over(url: str) -> None:
    """Have another server hold the namespace, as after a fail-over of a Redis, or of a database."""
    if url.partition("://")[0] in SQL_SCHEMES:
        with closing(Database(url)) as database:
            database.change("UPDATE {state} SET server = 'another' WHERE namespace = :namespace")
        return
    address, _, namespace = url.partition("?namespace=")
    with closing(redis.Redis.from_url(address)) as client:
        client.hset(f"{{{namespace}}}:meta", "server", "another")


def dump_of_redis(url: str) -> Callable[[], None]:
    """Take a dump of the namespace; call the answer to bring it back."""
    address, _, query = url.partition("?")
    pattern = f"{{{parse_qs(query)['namespace'][0]}}}:*"
    return dump_of_keys(lambda: redis.Redis.from_url(address), pattern)


def dump_of_keys(open_client: Callable[[], redis.Redis], pattern: str) -> Callable[[], None]:
    with closing(open_client()) as client:
        taken = {key: client.dump(key) or b"" for key in client.scan_iter(pattern)}

    def bring_back() -> None:
        with closing(open_client()) as client:
            for key in list(client.scan_iter(pattern)):
                client.delete(key)
            for key, value in taken.items():
                client.restore(key, 0, value)

    return bring_back


class Variables(Protocol):
    """Airflow's Variables, or what stands for them."""

    def get(self, key: str) -> str | None: ...

    def set(self, key: str, text: str, before: str | None) -> bool: ...


def dump_of_variable(
    variables: Variables, variable: str, take_keys: Callable[[], Callable[[], None]]
) -> Callable[[], None]:
    """Take a dump of the Variable, and of the keys of its store in Redis."""
    text, bring_back_keys = variables.get(variable), take_keys()
    assert text is not None

    def bring_back() -> None:
        assert variables.set(variable, text, variables.get(variable))
        bring_back_keys()

    return bring_back


def dump_of_database(url: str) -> Callable[[], None]:
    """Take a dump of the namespace in any database."""
    own = "{%s} WHERE namespace = :namespace"
    with closing(Database(url)) as database:
        taken = {table: database.rows(f"SELECT * FROM {own % table}") for table in STATE_TABLES}

    def bring_back() -> None:
        with closing(Database(url)) as database:
            for table, rows in taken.items():
                database.change(f"DELETE FROM {own % table}")
                for row in rows:
                    values = {f"value_{number}": value for number, value in enumerate(row)}
                    places = ", ".join(f":{name}" for name in values)
                    database.change(f"INSERT INTO {{{table}}} VALUES ({places})", **values)

    return bring_back


def dump_of_sqlite(path: Path) -> Callable[[], None]:
    kept = path.with_suffix(".dump")
    _copy(path, kept)
    return lambda: _copy(kept, path)


def _copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def dump_of_postgresql(server: Postgres) -> Callable[[], None]:
    server.psql(
        "DROP SCHEMA IF EXISTS dump CASCADE; CREATE SCHEMA dump; "
        + "; ".join(f"CREATE TABLE dump.{table} AS TABLE gpu_manager.{table}" for table in STATE_TABLES)
    )

    def bring_back() -> None:
        server.psql(
            "; ".join(
                f"DELETE FROM gpu_manager.{table}; INSERT INTO gpu_manager.{table} SELECT * FROM dump.{table}"
                for table in STATE_TABLES
            )
            + "; DROP SCHEMA dump CASCADE"
        )

    return bring_back
