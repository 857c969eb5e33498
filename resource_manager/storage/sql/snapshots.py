"""The snapshot of a state in a database, and what goes when the next one is written."""

from __future__ import annotations

import json
from dataclasses import replace as with_values
from typing import Any

from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Node
from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import snapshot_from_dict, snapshot_to_dict
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection
from resource_manager.storage.sql.state_row import JUMP

SNAPSHOT_EVERY = 1000
"""Changes after which the next snapshot is written."""

MAX_DROPPED = 5 * SNAPSHOT_EVERY
"""Changes dropped from the history at a time, as other clients may wait."""


class Snapshots:
    """The snapshot of a namespace: a state but for the changes after it, the servers apart from the rest."""

    def __init__(self, database: Database, history_length: int) -> None:
        self._database = database
        self._history_length = history_length
        self._inventory: tuple[int, tuple[Node, ...]] = (-1, ())
        """The servers as last read or written, and the version of the snapshot that they came with."""

    def read(self) -> ClusterState:
        """Return the state of the snapshot; raises `CorruptStateError`."""
        known, nodes = self._inventory
        row = self._database.row(
            "SELECT inventory_version, CASE WHEN inventory_version = :known THEN '' ELSE inventory END, body "
            "FROM {snapshot} WHERE namespace = :namespace",
            known=known,
        )
        if row is None:
            raise CorruptStateError("the state has no snapshot")
        inventory_version, inventory, body = row[0], row[1], row[2]
        if inventory_version != known:
            nodes = _snapshot(inventory).nodes
            self._inventory = inventory_version, nodes
        snapshot = with_values(_snapshot(body), nodes=nodes)
        return ClusterState.from_snapshot(snapshot)

    def write(self, connection: Connection, snapshot: Snapshot) -> None:
        """Write the first snapshot, or one that has nothing to do with the last one."""
        self._database.execute(connection, "DELETE FROM {snapshot} WHERE namespace = :namespace")
        self._database.execute(
            connection,
            "INSERT INTO {snapshot} (namespace, version, inventory_version, inventory, body) "
            "VALUES (:namespace, :version, :version, :inventory, :body)",
            version=snapshot.version,
            inventory=_inventory_json(snapshot),
            body=_body_json(snapshot),
        )

    def write_next(self, snapshot: Snapshot) -> None:
        """Write a snapshot, and drop what is beyond the limits of history and idempotency keys.

        It is not written to a server that has lost changes that are in it, by a fail-over a moment ago.
        """
        row = self._database.row(
            "SELECT version, inventory_version FROM {snapshot} WHERE namespace = :namespace"
        )
        if row is None or row[0] >= snapshot.version:
            return  # another client was first, or the state was replaced
        values: dict[str, Any] = {"version": snapshot.version, "before": row[0], "body": _body_json(snapshot)}
        inventory = ""
        if (row[1], snapshot.nodes) != self._inventory:
            inventory = ", inventory = :inventory, inventory_version = :version"
            values["inventory"] = _inventory_json(snapshot)
        limit = self._last_dropped(snapshot.version)

        def work(connection: Connection) -> bool:
            execute = self._database.execute
            written = execute(
                connection,
                f"UPDATE {{snapshot}} SET version = :version, body = :body{inventory} "
                "WHERE namespace = :namespace AND version = :before AND EXISTS (SELECT 1 FROM {state} s "
                "WHERE s.namespace = :namespace AND s.version >= :version AND s.server = {server})",
                **values,
            )
            if written.rowcount == 0:
                return False
            execute(
                connection,
                "DELETE FROM {change} WHERE namespace = :namespace AND version <= :limit",
                limit=limit,
            )
            for table in ("once", "lock", "session", "report", "job"):
                execute(
                    connection,
                    f"DELETE FROM {{{table}}} WHERE namespace = :namespace AND expires_at <= {{now}}",
                )
            return True

        if self._database.write(work) and inventory:
            self._inventory = snapshot.version, snapshot.nodes

    def _last_dropped(self, newest: int) -> int:
        """Return the version up to which changes go now; -1 if there are no more than are kept."""
        row = self._database.row("SELECT min(version) FROM {change} WHERE namespace = :namespace")
        oldest = None if row is None else row[0]
        last = newest - self._history_length
        if oldest is None or oldest > last:
            return -1
        there = "SELECT 1 FROM {change} WHERE namespace = :namespace AND version = :version"
        if self._history_length >= JUMP or self._database.row(there, version=last) is None:
            # Versions have jumped since: then the changes are counted, all that are kept.
            row = self._database.row(
                "SELECT version FROM {change} WHERE namespace = :namespace ORDER BY version DESC "
                "LIMIT 1 OFFSET :length",
                length=self._history_length,
            )
            if row is None:
                return -1
            last = int(row[0])
        return min(last, int(oldest) + MAX_DROPPED)


def _snapshot(text: str) -> Snapshot:
    try:
        return snapshot_from_dict(json.loads(text))
    except (ValueError, RecursionError, AttributeError) as error:
        raise CorruptStateError(f"its snapshot is not JSON: {error}") from error


def _body_json(snapshot: Snapshot) -> str:
    return _to_json(with_values(snapshot, nodes=()))


def _inventory_json(snapshot: Snapshot) -> str:
    return _to_json(Snapshot(0, 0, 0, nodes=snapshot.nodes))


def _to_json(snapshot: Snapshot) -> str:
    return json.dumps(snapshot_to_dict(snapshot), separators=(",", ":"), ensure_ascii=False)
