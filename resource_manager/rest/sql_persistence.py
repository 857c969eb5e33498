"""Tokens, sessions and the secret that signs them in a database, shared by all services of one store."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import partial

from resource_manager.rest.sessions import MAX_SESSIONS, SESSION_LIFE_S
from resource_manager.rest.tokens import Token, tokens_of
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection

END = (
    "DELETE FROM {session} WHERE namespace = :namespace AND token_id = :token_id AND session_id = :session_id"
)


def secret(database: Database, if_new: str = "") -> str:
    """Return the secret that signs sessions; the first service to ask creates it, as `if_new` if given."""

    def work(connection: Connection) -> str:
        row = database.execute(
            connection, "SELECT body FROM {secret} WHERE namespace = :namespace"
        ).fetchone()
        if row is not None:
            return str(row[0])
        made = if_new or secrets.token_hex(32)
        database.execute(
            connection, "INSERT INTO {secret} (namespace, body) VALUES (:namespace, :body)", body=made
        )
        return made

    return database.write(work)


class SqlTokens:
    """`TokenStore` in a table; its methods raise `StoreUnavailableError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> dict[str, Token]:
        found = self._database.rows("SELECT body FROM {token} WHERE namespace = :namespace")
        return tokens_of([body for (body,) in found], f"{self._database.address} table of tokens")

    def put(self, token: Token) -> None:
        def work(connection: Connection) -> None:  # no REPLACE, which would forget when it was used last
            execute = self._database.execute
            row = {"token_id": token.token_id, "body": json.dumps(token.row())}
            for statement in (
                "UPDATE {token} SET body = :body WHERE namespace = :namespace AND token_id = :token_id",
                "INSERT INTO {token} (namespace, token_id, body) VALUES (:namespace, :token_id, :body)",
            ):
                if execute(connection, statement, **row).rowcount:
                    return

        self._database.write(work)

    def delete(self, token_id: str) -> bool:
        statement = "DELETE FROM {token} WHERE namespace = :namespace AND token_id = :token_id"
        return self._database.change(statement, token_id=token_id) > 0

    def last_uses(self) -> dict[str, float]:
        found = self._database.rows(
            "SELECT token_id, used_at FROM {token} WHERE namespace = :namespace AND used_at IS NOT NULL"
        )
        return {str(token_id): float(used_at) for token_id, used_at in found}

    def note_use(self, token_id: str, at: float) -> None:
        statement = "UPDATE {token} SET used_at = :at WHERE namespace = :namespace AND token_id = :token_id"
        self._database.change(statement, token_id=token_id, at=at)


class SqlSessions:
    """`SessionStore` in a table; its methods raise `StoreUnavailableError`."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def begin(self, token_id: str, session_id: str) -> None:
        now = self._clock()

        def work(connection: Connection) -> None:
            execute = partial(self._database.execute, connection, token_id=token_id)
            execute(
                "DELETE FROM {session} WHERE namespace = :namespace AND token_id = :token_id "
                "AND (expires_at <= :now OR session_id = :session_id)",
                session_id=session_id,
                now=now,
            )
            execute(
                "INSERT INTO {session} (namespace, token_id, session_id, expires_at) "
                "VALUES (:namespace, :token_id, :session_id, :expires_at)",
                session_id=session_id,
                expires_at=now + SESSION_LIFE_S,
            )
            found = execute(
                "SELECT session_id FROM {session} WHERE namespace = :namespace AND token_id = :token_id "
                "ORDER BY expires_at DESC"
            )
            for (oldest,) in found.fetchall()[MAX_SESSIONS:]:
                execute(END, session_id=oldest)

        self._database.write(work)

    def is_live(self, token_id: str, session_id: str) -> bool:
        row = self._database.row(
            "SELECT expires_at FROM {session} "
            "WHERE namespace = :namespace AND token_id = :token_id AND session_id = :session_id",
            token_id=token_id,
            session_id=session_id,
        )
        return row is not None and bool(row[0] > self._clock())

    def end(self, token_id: str, session_id: str) -> None:
        self._database.change(END, token_id=token_id, session_id=session_id)
