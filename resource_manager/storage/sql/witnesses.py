"""Witnesses of a database's clock, as rows of the table `report`."""

from __future__ import annotations

from resource_manager.storage.sql.database import Database
from resource_manager.storage.witnesses import KEEP_S, Sighting

KIND = "clock"


class SqlWitnesses:
    """`Witnesses` in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, boot_id: str, sighting: Sighting) -> None:
        key = {"kind": KIND, "server": boot_id}
        self._database.write(
            lambda connection: self._database.put(connection, "report", key, KEEP_S, body=sighting.to_json())
        )

    def all(self) -> dict[str, Sighting]:
        rows = self._database.rows(
            "SELECT server, body FROM {report} WHERE namespace = :namespace AND kind = :kind", kind=KIND
        )
        return {boot_id: Sighting.from_json(body) for boot_id, body in rows}
