"""What a database lacks to serve as a store, in one line each."""

from __future__ import annotations

from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import check_format
from resource_manager.storage.finding import Finding, of_clock
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection, Fault, execute

RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def server(database: Database) -> list[Finding]:
    """Return what the server is and how it is set."""
    found = database.run(lambda connection: database.dialect.examine(connection))
    return [Finding(ok, words) for ok, words in found]


def clock(database: Database) -> list[Finding]:
    return [of_clock(database.time())]


def tables(database: Database) -> list[Finding]:
    """Try every right on every table in a way that changes nothing; tables are not created."""
    findings: list[Finding] = []
    lacking: dict[str, str] = {}
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
        found = {right: fault for right, fault in faults.items() if fault is not None}
        if any(fault.kind == "missing" for fault in found.values()):
            findings.append(Finding(False, f"no table {name}: run gpu-manager store create"))
            continue
        rights = [right for right, fault in found.items() if fault.kind == "rights"]
        if rights:
            lacking[name] = ", ".join(rights)
        others = {fault.text for fault in found.values() if fault.kind != "rights"}
        findings += [Finding(False, words) for words in sorted(others)]
    findings += _grants(database, lacking)
    return list(dict.fromkeys(findings)) or _state(database)


def _grants(database: Database, lacking: dict[str, str]) -> list[Finding]:
    """Return for each table that lacks rights, or for all at once, the statement that grants them."""
    if len(lacking) == len(database.tables.tables):
        lacking = {
            "": ", ".join(right for right in RIGHTS if any(right in each for each in lacking.values()))
        }

    def work(connection: Connection) -> list[str]:
        return [database.dialect.grant(connection, rights, name) for name, rights in lacking.items()]

    return [
        Finding(False, f"{f'table {name}' if name else 'tables'}: the user lacks {rights}: {statement}")
        for (name, rights), statement in zip(lacking.items(), database.run(work), strict=True)
    ]


CHECKS = (server, tables, clock)


def _state(database: Database) -> list[Finding]:
    """Return what the state is like where all tables and rights are, if there is one."""
    row = database.row("SELECT format, closed FROM {state} WHERE namespace = :namespace")
    stored, closed = (1, "") if row is None else row
    try:
        check_format(stored, f"the state of namespace {database.namespace}")
    except CorruptStateError as error:
        return [Finding(False, str(error))]
    there = Finding(True, f"{len(database.tables.tables)} tables with all rights")
    return [there, Finding(False, f"the state is closed: {closed}")] if closed else [there]


def _fault(database: Database, statement: str) -> Fault | None:
    """Return what speaks against a statement; raises `StoreError` if the server is away."""

    def work(connection: Connection) -> Fault | None:
        try:
            execute(database.dialect, connection, statement, {})
        except database.dialect.driver.Error as error:
            fault = database.dialect.explain(error)
            if fault.kind in {"away", "busy", "locked"}:
                raise  # the next one would wait as long
            return fault
        return None

    return database.run(work)
