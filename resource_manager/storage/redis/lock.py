"""The lock of a Redis server."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Protocol

import redis

from resource_manager.errors import StoreUnavailableError
from resource_manager.storage.locks import LOCK_TTL_S, Meanwhile, TimedLock, nothing
from resource_manager.storage.redis.client import Command, RedisClient, blocking_read, load_script

HEARTBEAT_S = 3.0
HANDOFF_MS = 1000
WAIT_S = 1.0
"""Time to live of a waiter's heartbeat and of an unclaimed hand-off, and limit of one blocking read. Each is
well above the delays of a busy machine and below what a user would notice."""

MEANWHILE_S = 0.016
"""Limit of the first blocking read if there is something to do meanwhile; about as long as ten holders take.
Each further one is twice as long, so that many who wait long do not keep the server busy."""


class Question(Protocol):
    """A command that is sent with each claim, and what is done with its answer."""

    def command(self) -> Command: ...

    def take(self, answer: Any) -> bool:
        """Return whether the answer was of use."""


class RedisLock(TimedLock):
    """A first come, first served lock between all processes that reach one Redis server.

    The holder's token is stored under one key with a time to live. A release hands the key to the first
    waiter in the same script and wakes it through a list on which only that waiter blocks. Waiters send
    heartbeats and are skipped once these stop.
    """

    def __init__(
        self,
        client: RedisClient,
        name: str = "lock",
        *,
        life_s: float = LOCK_TTL_S,
        beside: Question | None = None,
    ) -> None:
        super().__init__(life_s)
        self._client = client
        self._beside = beside
        self._keys = (client.key(name), client.key(f"{name}:waiters"))
        self._script = load_script("handover", "lock")

    def _claim(self, token: str, deadline: float, meanwhile: Meanwhile) -> float | None:
        try:
            since = time.monotonic()
            is_held, ttl_ms = self._acquire(token, asks=not self._client.contended)
            self.waited = self._client.contended = not is_held
            pause_s = WAIT_S if meanwhile is nothing else MEANWHILE_S
            while not is_held:
                wait_s = min(deadline - time.monotonic(), pause_s)
                pause_s = min(2 * pause_s, WAIT_S)
                if wait_s <= 0:
                    self._step("leave", token)
                    return None
                if ttl_ms > 0:
                    wait_s = min(wait_s, ttl_ms / 1000 + 0.005)
                since = time.monotonic()
                is_held, ttl_ms = self._wait(token, wait_s)
                if not is_held and self._beside is None:
                    meanwhile()
        except StoreUnavailableError:
            raise
        except BaseException:
            with suppress(StoreUnavailableError):
                self._step("leave", token)
            raise
        return since

    def _extend(self, token: str) -> bool:
        return bool(self._step("renew", token))

    def _hand_on(self, token: str) -> bool:
        return bool(self._step("release", token))

    def _args(self, step: str, token: str) -> tuple[str | int, ...]:
        return step, token, round(1000 * self._life_s), round(1000 * HEARTBEAT_S), HANDOFF_MS

    def _step(self, step: str, token: str) -> Any:
        return self._client.run(self._script, self._keys, self._args(step, token))

    def _wait(self, token: str, wait_s: float) -> list[int]:
        """Block until the hand-off or the timeout, then claim or send a heartbeat, in one round trip.

        The server runs what follows as soon as the blocking read returns, even while this process is slow to
        wake up.
        """
        return self._acquire(token, blocking_read(f"{self._keys[0]}:handoff:{token}", wait_s))

    def _acquire(self, token: str, *first: Command, asks: bool = True) -> list[int]:
        """Claim the lock, and ask what is to be asked beside it."""
        commands = [*first, self._script.command(self._keys, self._args("acquire", token))]
        beside = self._beside if asks else None
        if beside is not None:
            commands.append(beside.command())
        with self._client.reporting():
            try:
                answers = self._client.ask(*commands)
            except redis.exceptions.NoScriptError:
                found: list[int] = self._step("acquire", token)
                return found
        claim: list[int] = answers[len(first)]
        if beside is not None:
            self.is_fresh = beside.take(answers[-1]) and bool(claim[0])
        return claim
