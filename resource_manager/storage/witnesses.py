"""Witnesses of the store's clock: the machines whose processes compare it with a clock that never jumps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, Protocol

from resource_manager.storage.clock import Reading

if TYPE_CHECKING:
    from resource_manager.storage.redis.client import RedisClient

KEEP_S = 24 * 3600.0
"""Time for which a witness that is not heard of any more is kept, at least."""


class Sighting(NamedTuple):
    """What one machine saw of the store's clock: when it last watched, the last jump, and the last reading.

    Times are by the store's clock as it was then; `jumped_at` is 0 where there was no jump. By the reading a
    process that is started later sees that the clock jumped.
    """

    seen_at: float
    jump_s: float = 0.0
    jumped_at: float = 0.0
    reading: Reading = Reading()

    @property
    def told_at(self) -> float:
        return max(self.seen_at, self.reading.at + self.reading.ahead_s)

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Sighting:
        seen_at, jump_s, jumped_at, *reading = json.loads(text)
        return cls(seen_at, jump_s, jumped_at, *(Reading(*each) for each in reading))


class Witnesses(Protocol):
    """The last sighting of each machine, by its boot id; every method may raise `StoreUnavailableError`."""

    def put(self, boot_id: str, sighting: Sighting) -> None:
        """Keep it in the place of that machine's last one."""

    def all(self) -> dict[str, Sighting]:
        """Return those that are kept, by boot id."""


class MemoryWitnesses:
    """`Witnesses` in this process."""

    def __init__(self) -> None:
        self._kept: dict[str, Sighting] = {}

    def put(self, boot_id: str, sighting: Sighting) -> None:
        self._kept[boot_id] = sighting

    def all(self) -> dict[str, Sighting]:
        return dict(self._kept)


class RedisWitnesses:
    """`Witnesses` in a hash in Redis, of whom those from long ago are forgotten when another one comes."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._key = client.key("witnesses")

    def put(self, boot_id: str, sighting: Sighting) -> None:
        oldest = sighting.told_at - KEEP_S
        gone = [name for name, other in self.all().items() if other.told_at < oldest and name != boot_id]
        with self._client.reporting():
            self._client.ask(
                ("HSET", self._key, boot_id, sighting.to_json()),
                *([("HDEL", self._key, *gone)] if gone else []),
            )

    def all(self) -> dict[str, Sighting]:
        found = self._client.hash_of(self._key)
        return {boot_id.decode(): Sighting.from_json(text) for boot_id, text in found.items()}
