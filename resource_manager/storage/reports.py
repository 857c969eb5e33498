"""Reports of servers and sightings of the store's clock, kept beside the state for a limited time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from resource_manager.storage.clock import Reading

if TYPE_CHECKING:
    from resource_manager.storage.redis.client import RedisClient


RECORD_TTL_S = 7 * 24 * 3600.0
"""Time for which the record of a silent server's reports is kept: an older report is refused that long."""

SIGHTING_TTL_S = 24 * 3600.0
"""Time for which the sighting of a machine that is not heard of any more is kept, at least."""


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


class ReportStore(Protocol):
    """Last report of each server with a time to live, and a short record of its reports that outlives it.

    Both are JSON that only the receiver of the reports writes and reads. Beside them stands what each machine
    whose processes watch the store's clock last saw of it. Thread-safe; every method may raise
    `StoreUnavailableError`.
    """

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        """Keep both; the report for `ttl_s` seconds."""

    def reports(self, servers: Iterable[str]) -> dict[str, bytes]:
        """Return the reports of those of the servers that have one."""
        return self._live("report", servers)

    def records(self, servers: Iterable[str]) -> dict[str, bytes]:
        """Return the records of those of the servers that have one."""
        return self._live("record", servers)

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]: ...

    def put_sighting(self, boot_id: str, sighting: Sighting) -> None:
        """Keep it in the place of the last one of the machine with that boot id."""

    def sightings(self) -> dict[str, Sighting]:
        """Return those that are kept, by boot id."""


class MemoryReports(ReportStore):
    """`ReportStore` in this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._sightings: dict[str, Sighting] = {}

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        now = self._clock()
        with self._lock:
            self._kept["report", server] = (now + ttl_s, report)
            self._kept["record", server] = (now + RECORD_TTL_S, record)

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]:
        now = self._clock()
        with self._lock:
            found = {server: self._kept[kind, server] for server in servers if (kind, server) in self._kept}
        return {server: value for server, (until, value) in found.items() if until > now}

    def put_sighting(self, boot_id: str, sighting: Sighting) -> None:
        self._sightings[boot_id] = sighting

    def sightings(self) -> dict[str, Sighting]:
        return dict(self._sightings)


class RedisReports(ReportStore):
    """`ReportStore` in Redis: two keys for each server, and a hash of the sightings."""

    def __init__(self, client: RedisClient) -> None:
        from resource_manager.storage.redis.client import load_script  # loads the driver

        self._client = client
        self._put_sighting = load_script("put_sighting")
        self._sightings_key = client.key("witnesses")

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        key, record_key = self._client.key(f"report:{server}"), self._client.key(f"report-record:{server}")
        self._client.put((key, report, ttl_s), (record_key, record, RECORD_TTL_S))

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]:
        return self._client.texts("report:" if kind == "report" else "report-record:", servers)

    def put_sighting(self, boot_id: str, sighting: Sighting) -> None:
        oldest = sighting.told_at - SIGHTING_TTL_S
        others = self.sightings().items()
        gone = [name for name, other in others if other.told_at < oldest and name != boot_id]
        self._client.run(self._put_sighting, (self._sightings_key,), (boot_id, sighting.to_json(), *gone))

    def sightings(self) -> dict[str, Sighting]:
        found = self._client.hash_of(self._sightings_key)
        return {boot_id.decode(): Sighting.from_json(text) for boot_id, text in found.items()}
