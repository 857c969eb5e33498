"""Dumps of a store, taken and brought back by the means of its server, which the manager does not see."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs

import redis

from tests.sql_servers import Postgres


def dump_of_redis(url: str) -> Callable[[], None]:
    """Take a dump of the namespace; call the answer to bring it back."""
    address, _, query = url.partition("?")
    pattern = f"{{{parse_qs(query)['namespace'][0]}}}:*"
    with closing(redis.Redis.from_url(address)) as client:
        taken = {key: client.dump(key) or b"" for key in client.scan_iter(pattern)}

    def bring_back() -> None:
        with closing(redis.Redis.from_url(address)) as client:
            for key in list(client.scan_iter(pattern)):
                client.delete(key)
            for key, value in taken.items():
                client.restore(key, 0, value)

    return bring_back


def dump_of_sqlite(path: Path) -> Callable[[], None]:
    kept = path.with_suffix(".dump")
    _copy(path, kept)
    return lambda: _copy(kept, path)


def _copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def dump_of_postgresql(server: Postgres) -> Callable[[], None]:
    tables = ("state", "snapshot", "change")
    server.psql(
        "DROP SCHEMA IF EXISTS dump CASCADE; CREATE SCHEMA dump; "
        + "; ".join(f"CREATE TABLE dump.{table} AS TABLE gpu_manager.{table}" for table in tables)
    )

    def bring_back() -> None:
        server.psql(
            "; ".join(
                f"DELETE FROM gpu_manager.{table}; INSERT INTO gpu_manager.{table} SELECT * FROM dump.{table}"
                for table in tables
            )
            + "; DROP SCHEMA dump CASCADE"
        )

    return bring_back
