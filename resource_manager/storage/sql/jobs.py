"""Jobs of requests and their results in the table `job`, which commits write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import digest
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection

NAMES_AT_ONCE = 200


class SqlJobs:
    """`JobStore` in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        asked = list(names)

        def work(connection: Connection) -> dict[str, str]:
            found: dict[str, str] = {}
            for start in range(0, len(asked), NAMES_AT_ONCE):
                names = {f"name_{n}": name for n, name in enumerate(asked[start : start + NAMES_AT_ONCE])}
                rows = self._database.execute(
                    connection,
                    "SELECT name, body FROM {job} WHERE namespace = :namespace "
                    f"AND name IN ({', '.join(f':{name}' for name in names)}) "
                    "AND expires_at > {now} AND body <> ''",
                    **names,
                )
                found.update(rows.fetchall())
            return found

        return self._database.run(work) if asked else {}

    def write(self, rows: Sequence[JobRow]) -> None:
        def work(connection: Connection) -> None:
            for row in rows:
                key, caller = {"name": row.name}, digest(row.caller)
                self._database.put(connection, "job", key, row.keep_s, caller=caller, body=row.text)

        self._database.write(work)

    def bytes_of(self, caller: str) -> int:
        row = self._database.row(
            "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM {job} WHERE namespace = :namespace "
            "AND caller = :caller AND expires_at > {now}",
            caller=digest(caller),
        )
        assert row is not None
        return int(row[0])
