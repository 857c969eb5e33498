"""Reports of servers in the table `report`: two rows for each server."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.storage.reports import RECORD_TTL_S
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection


class SqlReports:
    """`ReportStore` in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        def work(connection: Connection) -> None:
            for kind, body, keep_s in (("report", report, ttl_s), ("record", record, RECORD_TTL_S)):
                key = {"kind": kind, "server": server}
                self._database.put(connection, "report", key, keep_s, body=body.decode())

        self._database.write(work)

    def reports(self, servers: Iterable[str]) -> dict[str, bytes]:
        return self._live("report", servers)

    def records(self, servers: Iterable[str]) -> dict[str, bytes]:
        return self._live("record", servers)

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]:
        def work(connection: Connection) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for server in servers:
                row = self._database.execute(
                    connection,
                    "SELECT body FROM {report} WHERE namespace = :namespace AND kind = :kind "
                    "AND server = :server AND expires_at > {now}",
                    kind=kind,
                    server=server,
                ).fetchone()
                if row is not None:
                    found[server] = row[0].encode()
            return found

        servers = list(servers)
        return self._database.run(work) if servers else {}
