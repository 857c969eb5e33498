"""Reports of servers, kept beside the state for those who look: the last one of each, for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from resource_manager.storage.redis.client import RedisClient


RECORD_TTL_S = 7 * 24 * 3600.0
"""Time for which the record of a silent server's reports is kept: an older report is refused that long."""


class ReportStore(Protocol):
    """Last report of each server with a time to live, and a short record of its reports that outlives it.

    Both are JSON that only the receiver of the reports writes and reads. Thread-safe; every method may raise
    `StoreUnavailableError`.
    """

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        """Keep both; the report for `ttl_s` seconds."""

    def reports(self, servers: Iterable[str]) -> dict[str, bytes]:
        """Return the reports of those of the servers that have one."""

    def records(self, servers: Iterable[str]) -> dict[str, bytes]:
        """Return the records of those of the servers that have one."""


class MemoryReports:
    """`ReportStore` in this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[float, bytes]] = {}

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        now = self._clock()
        with self._lock:
            self._kept["report", server] = (now + ttl_s, report)
            self._kept["record", server] = (now + RECORD_TTL_S, record)

    def reports(self, servers: Iterable[str]) -> dict[str, bytes]:
        return self._live("report", servers)

    def records(self, servers: Iterable[str]) -> dict[str, bytes]:
        return self._live("record", servers)

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]:
        now = self._clock()
        with self._lock:
            found = {server: self._kept[kind, server] for server in servers if (kind, server) in self._kept}
        return {server: value for server, (until, value) in found.items() if until > now}


class RedisReports:
    """`ReportStore` in Redis: two keys for each server."""

    def __init__(self, client: RedisClient) -> None:
        from resource_manager.storage.redis.client import load_script  # loads the driver

        self._client = client
        self._put = load_script("put_report")

    def put(self, server: str, report: bytes, record: bytes, ttl_s: float) -> None:
        keys = (self._key("report", server), self._key("report-record", server))
        lives_ms = (max(int(1000 * ttl_s), 1), int(1000 * RECORD_TTL_S))
        self._client.run(self._put, keys, (report, record, *lives_ms))

    def reports(self, servers: Iterable[str]) -> dict[str, bytes]:
        return self._live("report", servers)

    def records(self, servers: Iterable[str]) -> dict[str, bytes]:
        return self._live("report-record", servers)

    def _live(self, kind: str, servers: Iterable[str]) -> dict[str, bytes]:
        names = list(servers)
        if not names:
            return {}
        with self._client.reporting():
            [found] = self._client.ask(("MGET", *(self._key(kind, name) for name in names)))
        return {name: value for name, value in zip(names, found, strict=True) if value is not None}

    def _key(self, kind: str, server: str) -> str:
        return self._client.key(f"{kind}:{server}")
