"""What machines report, in the table `report`: two rows for each server, and one for each sighting."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.storage.reports import RECORD_TTL_S, SIGHTING_TTL_S, Sighting
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

    def put_sighting(self, boot_id: str, sighting: Sighting) -> None:
        key, body = {"kind": "clock", "server": boot_id}, sighting.to_json()
        self._database.write(
            lambda connection: self._database.put(connection, "report", key, SIGHTING_TTL_S, body=body)
        )

    def sightings(self) -> dict[str, Sighting]:
        rows = self._database.rows(
            "SELECT server, body FROM {report} WHERE namespace = :namespace AND kind = 'clock'"
        )
        return {boot_id: Sighting.from_json(body) for boot_id, body in rows}
