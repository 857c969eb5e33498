"""Idempotency keys in a database, each with the answer of the commit that was made under it."""

from __future__ import annotations

import math
import time

from resource_manager.errors import KeysFullError
from resource_manager.storage.once import KEEP_S, MAX_KEYS, Once
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection

COUNT_KEYS_S = 60.0
"""Time between two counts of the idempotency keys of one caller."""


class SqlKeys:
    """The idempotency keys of a namespace."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._full: dict[str, tuple[float, bool]] = {}

    def recall(self, once: Once) -> str | None:
        kept = self._database.run(lambda connection: self.answer_to(connection, once))
        if kept is None and self._has_all(once.caller):
            raise KeysFullError(MAX_KEYS)
        return None if kept is None else once.reference_in(kept)

    def answer_to(self, connection: Connection, key: Once) -> str | None:
        row = self._database.execute(
            connection,
            "SELECT answer FROM {once} WHERE namespace = :namespace AND caller = :caller AND name = :name "
            "AND expires_at > {now}",
            caller=key.caller,
            name=key.key,
        ).fetchone()
        return None if row is None else str(row[0])

    def _has_all(self, caller: str) -> bool:
        """Return whether the caller had `MAX_KEYS` when they were counted, at most `COUNT_KEYS_S` ago."""
        counted_at, is_full = self._full.get(caller, (-math.inf, False))
        if time.monotonic() - counted_at > COUNT_KEYS_S:
            [row] = self._database.rows(
                "SELECT count(*) FROM {once} WHERE namespace = :namespace AND caller = :caller "
                "AND expires_at > {now}",
                caller=caller,
            )
            is_full = int(row[0]) >= MAX_KEYS
            self._full[caller] = time.monotonic(), is_full
        return is_full

    def keep(self, connection: Connection, key: Once, reference: str) -> None:
        names = {"caller": key.caller, "name": key.key}
        self._database.put(connection, "once", names, KEEP_S, answer=key.stored(reference))
