"""Tokens, cached answers and the session secret in Redis, shared by all services of one store."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from typing import Any

from resource_manager.rest.idempotency import KEEP_S, MAX_KEPT
from resource_manager.rest.sessions import MAX_SESSIONS, SESSION_LIFE_S
from resource_manager.rest.tokens import Token
from resource_manager.storage.redis.client import RedisClient, load_script


def secret(client: RedisClient) -> str:
    """Return the secret that signs sessions; the first service to ask creates it."""
    key = client.key("session-secret")
    with client.reporting():
        # Read first: with full memory Redis refuses even a SET NX that would do nothing.
        found = client.driver.get(key)
        if found is None:
            client.driver.set(key, secrets.token_hex(32), nx=True)
            found = client.driver.get(key)
        return _text(found) or ""


class TokenRedis:
    """`TokenStore` in one Redis hash; its methods raise `StoreUnavailableError`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._key = client.key("tokens")

    def read(self) -> dict[str, Token]:
        with self._client.reporting():
            rows = [json.loads(value) for value in self._client.driver.hvals(self._key)]
        return {row["token_id"]: Token.from_row(row) for row in rows}

    def put(self, token: Token) -> None:
        with self._client.reporting():
            self._client.driver.hset(self._key, token.token_id, json.dumps(asdict(token)))

    def delete(self, token_id: str) -> bool:
        with self._client.reporting():
            return bool(self._client.driver.hdel(self._key, token_id))


class RedisSessions:
    """`SessionStore` in Redis, a sorted set for each token; its methods raise `StoreUnavailableError`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def begin(self, token_id: str, session_id: str) -> None:
        script = load_script("begin_session")
        self._client.run(
            script, [self._key(token_id)], (session_id, time.time(), SESSION_LIFE_S, MAX_SESSIONS)
        )

    def is_live(self, token_id: str, session_id: str) -> bool:
        with self._client.reporting():
            end = self._client.driver.zscore(self._key(token_id), session_id)
        return end is not None and end > time.time()

    def end(self, token_id: str, session_id: str) -> None:
        with self._client.reporting():
            self._client.driver.zrem(self._key(token_id), session_id)

    def _key(self, token_id: str) -> str:
        return self._client.key(f"sessions:{token_id}")


class RedisIdempotencyCache:
    """`ReplyStore` in Redis; its methods raise `StoreUnavailableError`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def claim(self, caller: str, key: str, value: str, keep_s: int) -> str | None:
        keys = (self._name(caller, key), self._names(caller, "short"))
        return _text(self._client.run(load_script("claim_reply"), keys, (value, keep_s, MAX_KEPT)))

    def put(self, caller: str, key: str, claimed: str, value: str, keep_s: int) -> None:
        kept = self._names(caller, "long" if keep_s == KEEP_S else "short")
        keys = (self._name(caller, key), self._names(caller, "short"), kept)
        self._client.run(load_script("keep_reply"), keys, (claimed, value, keep_s, MAX_KEPT))

    def drop(self, caller: str, key: str, claimed: str) -> None:
        keys = (self._name(caller, key), self._names(caller, "short"))
        self._client.run(load_script("drop_reply"), keys, (claimed,))

    def _names(self, caller: str, life: str) -> str:
        return self._client.key(f"replies:{caller}:{life}")

    def _name(self, caller: str, key: str) -> str:
        return self._client.key(f"reply:{caller}:{key}")


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
