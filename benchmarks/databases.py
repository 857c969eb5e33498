"""Speed of the manager on PostgreSQL, MariaDB and SQLite, beside a bare compare-and-set of one row."""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contention import in_processes
from resource_manager.cli.bench.store import interleaved, ratio
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.store import SqlStore
from tests.sql_servers import MariaDB, Postgres, SqlServer

KINDS: dict[str, type[SqlServer] | None] = {"postgresql": Postgres, "mariadb": MariaDB, "sqlite": None}
CLIENTS = 32
HISTORY = 1_000_000
STEP = 50_000
ROUNDS = 6
"""Long enough for each to write snapshots, as every thousandth commit does."""
DIGITS = " UNION ALL ".join(f"SELECT {digit}{' AS d' if not digit else ''}" for digit in range(10))


@contextmanager
def server(kind: str) -> Iterator[str]:
    """Yield the URL of a database of its own that forces each commit to the disk."""
    server_class = KINDS[kind]
    if server_class is None:
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/state.db"
        return
    started = Postgres(options="-c fsync=on") if server_class is Postgres else server_class()
    try:
        yield started.url
    finally:
        started.stop()


def bare_pair(url: str) -> Callable[[], object]:
    """Return a function that twice compares and sets a row, through the driver alone."""
    kind = url.partition("://")[0]
    if kind == "sqlite":
        connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        mark = "?"
    elif kind == "postgresql":
        import psycopg

        connection, mark = psycopg.connect(url, autocommit=True), "%s"
    else:
        import pymysql

        address = Database(url).engine.url
        connection = pymysql.connect(
            host=address.host,
            port=address.port or 3306,
            user=address.username,
            database=address.database,
            autocommit=True,
        )
        mark = "%s"
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE bare (id INT PRIMARY KEY, version BIGINT)")
    cursor.execute("INSERT INTO bare VALUES (1, 0)")
    version = 0

    def pair() -> None:
        nonlocal version
        for _ in range(2):
            statement = f"UPDATE bare SET version = {mark} WHERE id = 1 AND version = {mark}"
            cursor.execute(statement, (version + 1, version))
            assert cursor.rowcount == 1
            version += 1

    return pair


def open_manager(url: str, namespace: str, **settings: Any) -> GPUResourceManager:
    inventory = default_inventory(4, 8, 64)
    return GPUResourceManager.from_url(f"{url}?namespace={namespace}", inventory=inventory, **settings)


def pair_of(manager: GPUResourceManager, latencies_s: list[float] | None = None) -> Callable[[], object]:
    def pair() -> None:
        begin = time.perf_counter()
        assert manager.allocate_resources("bench", 4, 32) is not None
        middle = time.perf_counter()
        assert manager.release_resources("bench")
        if latencies_s is not None:
            latencies_s.extend((middle - begin, time.perf_counter() - middle))

    return pair


def fill_history(manager: GPUResourceManager) -> None:
    """Write a million changes, as if as many had been made, and the snapshot after them."""
    assert manager.allocate_resources("bench", 4, 32) is not None
    assert manager.release_resources("bench")
    store = manager.store
    assert isinstance(store, SqlStore)
    database = store.database
    odd, even = (
        database.row(
            "SELECT body FROM {change} WHERE namespace = :namespace AND version = :version", version=version
        )
        for version in (1, 2)
    )
    assert odd is not None
    assert even is not None
    digits = ", ".join(f"({DIGITS}) AS d{place}" for place in range(5))
    number = " + ".join(f"d{place}.d * {10**place}" for place in range(5))
    for first in range(2, HISTORY, STEP):
        database.run(
            lambda connection, first=first: database.execute(  # type: ignore[misc]
                connection,
                "INSERT INTO {change} (namespace, version, at, commit_id, body) "
                f"SELECT :namespace, :first + 1 + {number}, 1.0, 'filled', "
                f"CASE WHEN ({number}) % 2 = 0 THEN :odd ELSE :even END "
                f"FROM {digits} WHERE {number} < :step",
                first=first,
                step=min(STEP, HISTORY - first),
                odd=odd[0],
                even=even[0],
            )
        )
    for statement in (
        "UPDATE {state} SET version = :version WHERE namespace = :namespace",
        "UPDATE {snapshot} SET version = :version, body = REPLACE(body, :before, :after) "
        "WHERE namespace = :namespace",
    ):
        database.run(
            lambda connection, statement=statement: database.execute(  # type: ignore[misc]
                connection, statement, version=HISTORY, before='"version":0,', after=f'"version":{HISTORY},'
            )
        )


def many_clients(url: str, seconds: float, processes: int) -> dict[str, Any]:
    """Measure 32 clients in so many processes, with a manager each: pairs per second, errors."""
    clients = in_processes("fit", url, seconds, processes, clients=CLIENTS // processes)
    return {
        "clients": CLIENTS,
        "errors": sum(client["errors"] + client["refused"] for client in clients),
        "pairs_per_s": sum(client["pairs"] for client in clients) / seconds,
    }


def measure(kind: str, seconds: float) -> dict[str, Any]:
    """Measure one kind of database; ratios are to the bare pair, measured in alternation."""
    with server(kind) as url:
        latencies_s: list[float] = []
        short = open_manager(url, "short")
        bare_rates, rates = interleaved([bare_pair(url), pair_of(short, latencies_s)], 3 * seconds, ROUNDS)
        long = open_manager(url, "long", history_length=2 * HISTORY)
        fill_history(long)
        long.close()
        long = open_manager(url, "long", history_length=2 * HISTORY)
        short_rates, long_rates = interleaved([pair_of(short), pair_of(long)], 3 * seconds, ROUNDS)
        clients = {processes: many_clients(url, 2 * seconds, processes) for processes in (4, CLIENTS)}
        for figures in clients.values():
            figures["of_bare_pair"] = figures["pairs_per_s"] / statistics.median(bare_rates)
        short.close()
        long.close()
        return {
            "bare_pairs_per_s": statistics.median(bare_rates),
            "pairs_per_s": statistics.median(rates),
            "of_bare_pair": ratio(rates, bare_rates),
            "call_p50_ms": 1000 * statistics.median(latencies_s),
            "slower_with_a_million_changes": ratio(short_rates, long_rates),
            "clients_32": clients[4],
            "clients_32_processes": clients[CLIENTS],
        }


def measure_all(seconds: float) -> dict[str, Any]:
    """Measure every kind of database that this machine has."""
    there = [kind for kind, needs in KINDS.items() if needs is None or not needs.missing()]
    return {kind: measure(kind, seconds) for kind in there}


if __name__ == "__main__":
    print(json.dumps({kind: measure(kind, 1.0) for kind in sys.argv[1:] or KINDS}, indent=1))
