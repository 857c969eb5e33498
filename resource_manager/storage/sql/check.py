"""What a database lacks to serve as a store, in one line each."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, text

from resource_manager.errors import StoreError
from resource_manager.storage.sql.database import Database

MAX_CLOCK_DIFFERENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check; `ok` is false if the store does not work, or may lose data."""

    ok: bool
    text: str


def check(database: Database) -> list[Finding]:
    """Return what is there and what is missing; raises `StoreError` if the database cannot be reached."""
    findings = [
        Finding(ok, words)
        for ok, words in database.run(lambda connection: database.dialect.examine(connection))
    ]
    findings += _tables(database)
    difference_s = abs(database.run(lambda c: database.execute(c, "SELECT {now}").scalar_one()) - time.time())
    findings.append(
        Finding(
            difference_s < MAX_CLOCK_DIFFERENCE_S,
            f"its clock differs from this machine's by {difference_s:.1f} s, and leases end by it",
        )
    )
    return findings


def _tables(database: Database) -> list[Finding]:
    """Try every right on every table in a way that changes nothing; tables are not created."""
    findings = []
    for table in database.tables.sorted_tables:
        name = database.dialect.quoted(table.name.removeprefix(database.dialect.prefix))
        columns = [database.dialect.quoted_column(column.name) for column in table.columns]
        assigned = ", ".join(f"{column} = {column}" for column in columns)
        tried = {
            "SELECT": f"SELECT {', '.join(columns)} FROM {name} WHERE 1 = 0",
            "INSERT": f"INSERT INTO {name} ({', '.join(columns)}) "
            f"SELECT {', '.join(columns)} FROM {name} WHERE 1 = 0",
            "UPDATE": f"UPDATE {name} SET {assigned} WHERE 1 = 0",
            "DELETE": f"DELETE FROM {name} WHERE 1 = 0",
        }
        if table.name.endswith("lock"):  # its positions are the server's own
            del tried["INSERT"], tried["UPDATE"]
        missing = [right for right, statement in tried.items() if not _works(database, statement)]
        if len(missing) == len(tried):
            findings.append(
                Finding(False, f"no table {name}, or no right to it: run gpu-manager store create")
            )
        elif missing:
            findings.append(Finding(False, f"table {name}: the user lacks {', '.join(missing)}"))
    if not findings:
        findings.append(Finding(True, f"{len(database.tables.tables)} tables with all rights"))
    return findings


def _works(database: Database, statement: str) -> bool:
    def work(connection: Connection) -> None:
        connection.execute(text(statement))

    try:
        database.run(work, create=False)
    except StoreError:
        return False
    return True
