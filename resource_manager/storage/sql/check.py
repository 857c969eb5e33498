"""What a database lacks to serve as a store, in one line each."""

from __future__ import annotations

import time
from dataclasses import dataclass

from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import check_format
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection, Fault, execute

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
    told = {finding.text for finding in findings}
    findings += [finding for finding in _tables(database) if finding.text not in told]
    difference_s = abs(database.time() - time.time())
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
        faults = {right: _fault(database, statement) for right, statement in tried.items()}
        missing = [right for right, fault in faults.items() if fault and fault.kind in {"missing", "rights"}]
        if len(missing) == len(tried):
            findings.append(
                Finding(False, f"no table {name}, or no right to it: run gpu-manager store create")
            )
        elif missing:
            findings.append(Finding(False, f"table {name}: the user lacks {', '.join(missing)}"))
        others = {fault.text for right, fault in faults.items() if fault and right not in missing}
        findings += [Finding(False, words) for words in sorted(others)]
    return list(dict.fromkeys(findings)) or [_format(database)]


def _format(database: Database) -> Finding:
    """Return what is there where all tables and rights are: the format of the state, if there is one."""
    row = database.row("SELECT format FROM {state} WHERE namespace = :namespace")
    try:
        check_format(1 if row is None else row[0], f"the state of namespace {database.namespace}")
    except CorruptStateError as error:
        return Finding(False, str(error))
    return Finding(True, f"{len(database.tables.tables)} tables with all rights")


def _fault(database: Database, statement: str) -> Fault | None:
    """Return what speaks against a statement; raises `StoreError` if the server is away."""

    def work(connection: Connection) -> Fault | None:
        try:
            execute(database.dialect, connection, statement, {})
        except database.dialect.driver.Error as error:
            fault = database.dialect.explain(error)
            if fault.kind in {"away", "busy"}:
                raise  # it is tried again
            return fault
        return None

    return database.run(work)
