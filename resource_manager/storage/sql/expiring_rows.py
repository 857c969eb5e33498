"""Rows that expire: idempotency keys with their answers, jobs and their results, reports and sightings."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from resource_manager.errors import KeysFullError, StoreError
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import KEEP_S, MAX_KEYS, Once, digest
from resource_manager.storage.reports import RECORD_TTL_S, SIGHTING_TTL_S, ReportStore, Sighting
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection

COUNT_KEYS_S = 60.0
"""Time between two counts of the idempotency keys of one caller."""

NAMES_AT_ONCE = 200

BRIEF_S = 60.0
"""Rows that are kept for no longer, such as parts of output, are deleted by the process that wrote them."""

DROP_S = 10.0
"""Time between two looks of a process at which of its brief rows are over."""


class SqlKeys:
    """The idempotency keys of a namespace, each with the answer of the commit that was made under it."""

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


class SqlJobs:
    """`JobStore` in the table `job`, which commits write.

    Most rows go with a snapshot, as each hangs on a change. Brief ones cannot wait for it: of them many are
    written between two changes, each under a new name.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._brief: deque[tuple[float, str]] = deque()
        """Of the brief rows of this process the times after which they are over, and the names."""
        self._drop_at = 0.0

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        return _bodies(self._database, "job", "name", names)

    def write(self, rows: Sequence[JobRow]) -> None:
        if (now := time.monotonic()) >= self._drop_at:
            self._drop_at = now + DROP_S
            self._drop_brief(now)

        def work(connection: Connection) -> None:
            for row in rows:
                key = {"name": row.name}
                self._database.put(connection, "job", key, row.keep_s, caller=row.whose, body=row.text)

        self._database.write(work)
        now = time.monotonic()
        self._brief += [(now + row.keep_s, row.name) for row in rows if row.keep_s <= BRIEF_S]

    def _drop_brief(self, now: float) -> None:
        over: list[tuple[float, str]] = []
        with suppress(IndexError):  # there are no more
            # Another thread may look, too: what was looked at is what was taken.
            while (first := self._brief.popleft())[0] <= now:
                over.append(first)
            self._brief.appendleft(first)
        try:
            for start in range(0, len(over), NAMES_AT_ONCE):
                among, names = _among([name for _, name in over[start : start + NAMES_AT_ONCE]])
                # Another process may have written a row of that name since.
                self._database.change(
                    f"DELETE FROM {{job}} WHERE namespace = :namespace AND name IN ({among}) "
                    "AND expires_at <= {now}",
                    **names,
                )
        except StoreError:
            self._brief.extendleft(reversed(over))
            raise

    def bytes_of(self, caller: str) -> int:
        row = self._database.row(
            "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM {job} WHERE namespace = :namespace "
            "AND caller = :caller AND expires_at > {now}",
            caller=digest(caller),
        )
        assert row is not None
        return int(row[0])


class SqlReports(ReportStore):
    """`ReportStore` in the table `report`: two rows for each server, and one for each sighting."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        def work(connection: Connection) -> None:
            for kind, body, keep_s in (("report", report, ttl_s), ("record", record, RECORD_TTL_S)):
                key = {"kind": kind, "server": server}
                self._database.put(connection, "report", key, keep_s, body=body.decode())

        self._database.write(work)

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]:
        found = _bodies(self._database, "report", "server", servers, kind=kind)
        return {server: body.encode() for server, body in found.items()}

    def put_sighting(self, boot_id: str, sighting: Sighting) -> None:
        key, body = {"kind": "clock", "server": boot_id}, sighting.to_json()
        self._database.run(
            lambda connection: self._database.put(connection, "report", key, SIGHTING_TTL_S, body=body)
        )

    def sightings(self) -> dict[str, Sighting]:
        rows = self._database.rows(
            "SELECT server, body FROM {report} WHERE namespace = :namespace AND kind = 'clock'"
        )
        return {boot_id: Sighting.from_json(body) for boot_id, body in rows}


def _bodies(database: Database, table: str, column: str, among: Iterable[str], **of: str) -> dict[str, str]:
    """Return what is not empty and has not ended, by its name in that column; `of` is the rest of the key."""
    every = list(among)
    where = "".join(f" AND {name} = :{name}" for name in of)

    def work(connection: Connection) -> dict[str, str]:
        found: dict[str, str] = {}
        for start in range(0, len(every), NAMES_AT_ONCE):
            among, names = _among(every[start : start + NAMES_AT_ONCE])
            rows = database.execute(
                connection,
                f"SELECT {column}, body FROM {{{table}}} WHERE namespace = :namespace{where} "
                f"AND {column} IN ({among}) AND expires_at > {{now}} AND body <> ''",
                **of,
                **names,
            )
            found.update(rows.fetchall())
        return found

    return database.run(work) if every else {}


def _among(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the parameters of these names as they stand in a statement, and their values."""
    values = {f"name_{n}": name for n, name in enumerate(names)}
    return ", ".join(f":{name}" for name in values), values
