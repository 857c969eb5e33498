"""Witnesses of a database's clock, as rows of the table `report`."""

from __future__ import annotations

from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection
from resource_manager.storage.witnesses import KEEP_S, Sighting

KIND = "clock"


class SqlWitnesses:
    """`Witnesses` in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, boot_id: str, sighting: Sighting) -> None:
        def work(connection: Connection) -> None:
            self._database.execute(
                connection,
                "DELETE FROM {report} WHERE namespace = :namespace AND kind = :kind AND server = :boot_id",
                kind=KIND,
                boot_id=boot_id,
            )
            self._database.execute(
                connection,
                "INSERT INTO {report} (namespace, kind, server, body, expires_at) "
                "VALUES (:namespace, :kind, :boot_id, :body, {now} + :keep_s)",
                kind=KIND,
                boot_id=boot_id,
                body=sighting.to_json(),
                keep_s=KEEP_S,
            )

        self._database.write(work)

    def all(self) -> dict[str, Sighting]:
        rows = self._database.run(
            lambda connection: self._database.execute(
                connection,
                "SELECT server, body FROM {report} WHERE namespace = :namespace AND kind = :kind",
                kind=KIND,
            ).fetchall()
        )
        return {boot_id: Sighting.from_json(body) for boot_id, body in rows}
