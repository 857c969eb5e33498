"""Tokens, replies and the session secret in Redis, shared by all services of one store."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from typing import Any

from resource_manager.api.tokens import Token
from resource_manager.redis_client import RedisClient


def secret(client: RedisClient) -> str:
    """What signs sessions, made by whoever comes first."""
    key = client.key("session-secret")
    with client.reporting():
        client.driver.set(key, secrets.token_hex(32), nx=True)
        return _text(client.driver.get(key)) or ""


class TokenRedis:
    """Hashes in one Redis hash; raises `StoreUnavailableError`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._key = client.key("tokens")

    def read(self) -> dict[str, Token]:
        with self._client.reporting():
            rows = [json.loads(value) for value in self._client.driver.hvals(self._key)]
        return {row["token_id"]: Token(**row) for row in rows}

    def put(self, token: Token) -> None:
        with self._client.reporting():
            self._client.driver.hset(self._key, token.token_id, json.dumps(asdict(token)))

    def delete(self, token_id: str) -> bool:
        with self._client.reporting():
            return bool(self._client.driver.hdel(self._key, token_id))


class RedisReplies:
    """Answers to keys seen before; raises `StoreUnavailableError`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def claim(self, key: str, value: str, keep_s: int) -> str | None:
        driver, name = self._client.driver, self._name(key)
        with self._client.reporting():
            while not driver.set(name, value, nx=True, ex=keep_s):
                found = _text(driver.get(name))
                if found is not None:  # else it ran out between the two calls: claim it
                    return found
            return None

    def put(self, key: str, value: str, keep_s: int) -> None:
        with self._client.reporting():
            self._client.driver.set(self._name(key), value, ex=keep_s)

    def drop(self, key: str) -> None:
        with self._client.reporting():
            self._client.driver.delete(self._name(key))

    def _name(self, key: str) -> str:
        return self._client.key(f"reply:{key}")


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
