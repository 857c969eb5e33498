"""Tokens and the session secret in Redis, shared by all services of one store."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from resource_manager.rest.sessions import MAX_SESSIONS, SESSION_LIFE_S
from resource_manager.rest.tokens import Token, tokens_of
from resource_manager.storage.redis.client import RedisClient, load_script


def secret(client: RedisClient, if_new: str = "") -> str:
    """Return the secret that signs sessions; the first service to ask creates it, as `if_new` if given."""
    key = client.key("session-secret")
    with client.reporting():
        # Read first: with full memory Redis refuses even a SET NX that would do nothing.
        found: Any = client.driver.get(key)
        if found is None:
            client.driver.set(key, if_new or secrets.token_hex(32), nx=True)
            found = client.driver.get(key)
        return (found or b"").decode()


class RedisTokens:
    """`TokenStore` in two Redis hashes; its methods raise `StoreUnavailableError`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._key = client.key("tokens")
        self._uses_key = client.key("token-uses")
        self._read: tuple[list[bytes | str], dict[str, Token]] = ([], {})

    def read(self) -> dict[str, Token]:
        with self._client.reporting():
            values = list(self._client.driver.hvals(self._key))
        before, found = self._read
        if values != before:  # a thousand agents have a thousand tokens
            found = tokens_of(values, f"{self._client.address} {self._key}")
            self._read = (values, found)
        return dict(found)

    def put(self, token: Token) -> None:
        with self._client.reporting():
            self._client.driver.hset(self._key, token.token_id, json.dumps(token.row()))

    def delete(self, token_id: str) -> bool:
        with self._client.reporting():
            self._client.driver.hdel(self._uses_key, token_id)
            return bool(self._client.driver.hdel(self._key, token_id))

    def last_uses(self) -> dict[str, float]:
        found = self._client.hash_of(self._uses_key)
        return {token_id.decode(): float(at) for token_id, at in found.items()}

    def note_use(self, token_id: str, at: float) -> None:
        with self._client.reporting():
            self._client.driver.hset(self._uses_key, token_id, at)


class RedisSessions:
    """`SessionStore` in Redis, a sorted set for each token; its methods raise `StoreUnavailableError`."""

    def __init__(self, client: RedisClient, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock

    def begin(self, token_id: str, session_id: str) -> None:
        script = load_script("begin_session")
        self._client.run(
            script, [self._key(token_id)], (session_id, self._clock(), SESSION_LIFE_S, MAX_SESSIONS)
        )

    def is_live(self, token_id: str, session_id: str) -> bool:
        with self._client.reporting():
            end = self._client.driver.zscore(self._key(token_id), session_id)
        return end is not None and end > self._clock()

    def end(self, token_id: str, session_id: str) -> None:
        with self._client.reporting():
            self._client.driver.zrem(self._key(token_id), session_id)

    def _key(self, token_id: str) -> str:
        return self._client.key(f"sessions:{token_id}")
