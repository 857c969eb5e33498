"""The row of a state and the changes behind it, as a database gives them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from resource_manager.core.changes import Change
from resource_manager.storage.codec import change_from_json
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection

JUMP = 2**20
"""Distance by which version and fencing token jump after a fail-over, beyond all that may have been lost."""

SEQUENCE_JUMP = 8192
"""The same for the number in the order of arrival: short, since short ids are used up by it."""


class StateRow(NamedTuple):
    """The row of `state`, whether the server still is the one that wrote it, and the time there."""

    format: int
    incarnation: str
    version: int | None
    last_fencing_token: int
    sequence: int
    server: str
    this_server: str
    suspended_until: float
    clock_jump_s: float
    operator_reset: bool
    closed: str
    lock_token: str
    lock_expires_at: float
    now: float


class StoredChange(NamedTuple):
    """A row of `change`."""

    version: int
    body: str
    commit_id: str


_COLUMNS = (
    "s.format, s.incarnation, s.version, s.last_fencing_token, s.sequence, s.server, {server}, "
    "s.suspended_until, s.clock_jump_s, s.operator_reset, s.closed, s.lock_token, "
    "s.lock_expires_at, {now}"
)
_STATE = f"SELECT {_COLUMNS} FROM {{state}} s WHERE s.namespace = :namespace"
STATE_AND_CHANGES = (
    f"SELECT {_COLUMNS}, c.version, c.body, c.commit_id FROM {{state}} s LEFT JOIN ("
    "SELECT version, CASE WHEN version = :since THEN '' ELSE body END AS body, commit_id FROM {change} "
    "WHERE namespace = :namespace AND version >= :since ORDER BY version LIMIT :limit) c ON 1 = 1 "
    "WHERE s.namespace = :namespace ORDER BY c.version"
)
CHANGES = (
    "SELECT version, body, commit_id FROM {change} WHERE namespace = :namespace AND version >= :first "
    "ORDER BY version LIMIT :limit"
)


def state_row(database: Database, connection: Connection, suffix: str = "") -> StateRow | None:
    row = database.execute(connection, _STATE + suffix).fetchone()
    return None if row is None else StateRow(*row)


def decoded(stored: Sequence[StoredChange]) -> list[Change]:
    return [change_from_json(change.body) for change in stored]


def new_commit_id() -> str:
    return os.urandom(12).hex()
