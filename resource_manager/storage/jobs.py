"""Jobs of requests and their results: stored in a commit, beside the state, and in no change or snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from resource_manager.core.models import KEY_SEPARATOR
from resource_manager.errors import BusyError
from resource_manager.storage.once import digest

if TYPE_CHECKING:
    from resource_manager.storage.redis.client import RedisClient

MAX_JOB_BYTES = 64 * 1024
"""Most bytes of a job as JSON."""

MAX_BYTES_OF_CALLER = 64 * 2**20
"""Most bytes of all stored jobs of one caller, about: they are counted before the commit."""

LIVE_S = 90 * 86400.0
"""Longest time for which a job waits and runs: so none stays whose end no commit told, as after a reset."""

ENDED_S = 86400.0
"""Time for which a job stays after the end of its lease, unless its result is collected before."""

RESULT_S = 7 * 86400.0
"""Time for which a result stays."""


A_KEY = "openssl rand -base64 32 | tr +/ -_"
"""Command that prints a key for `GPU_MANAGER_JOB_KEYS`."""


NOBODY = "-"
"""Whose the rows are that count for no caller; no digest. In commit.lua, too."""


class JobRow(NamedTuple):
    """Text that a commit stores under a name for `keep_s` seconds; an empty one only changes that time.

    `caller` is whose bytes it counts as, None for what no caller has stored, such as the end of a job.
    """

    name: str
    caller: str | None
    text: str
    keep_s: float

    @property
    def whose(self) -> str:
        """What stores keep in the place of the caller."""
        return NOBODY if self.caller is None else digest(self.caller)


class TooManyJobsError(BusyError):
    """A caller's stored jobs and orders have `MAX_BYTES_OF_CALLER` already; each goes after its lease."""


class JobStore(Protocol):
    """Rows that commits have stored; thread-safe. Every method may raise `StoreUnavailableError`."""

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        """Return the texts of those of the names that have one."""

    def write(self, rows: Sequence[JobRow]) -> None:
        """Store rows that hang on no commit."""

    def bytes_of(self, caller: str) -> int:
        """Return how many bytes the texts of a caller have, about."""


def job_name(lease_id: str) -> str:
    return digest(f"job {lease_id}")


def order_name(key: str) -> str:
    """Return the name of the last order about the job with that key."""
    return digest(f"order {key}")


def result_name(lease_id: str, fencing_token: int) -> str:
    """Return the name of the result of a lease."""
    return digest(f"result {fencing_token} {lease_id}")


def newest_name(lease_id: str, *owner: str) -> str:
    """Return the name of the token of the newest result of a lease id, or of an owner's of that id."""
    return digest(f"result newest {KEY_SEPARATOR.join((lease_id, *owner))}")


def merged(rows: Iterable[JobRow]) -> list[JobRow]:
    """Return one row a name, so that a commit may write them in any order."""
    found: dict[str, JobRow] = {}
    for row in rows:
        before = found.get(row.name)
        found[row.name] = row if before is None or row.text else before._replace(keep_s=row.keep_s)
    return list(found.values())


class MemoryJobs:
    """`JobStore` in this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[JobRow, float]] = {}

    def write(self, rows: Sequence[JobRow]) -> None:
        """Store these rows, as a commit does."""
        now = self._clock()
        with self._lock:
            for name in [name for name, (_, until) in self._rows.items() if until <= now]:
                del self._rows[name]
            for row in rows:
                before = self._rows.get(row.name)
                kept = row if row.text or before is None else before[0]
                self._rows[row.name] = kept, now + row.keep_s

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        now = self._clock()
        with self._lock:
            found = {name: self._rows[name] for name in names if name in self._rows}
        return {name: row.text for name, (row, until) in found.items() if row.text and until > now}

    def bytes_of(self, caller: str) -> int:
        now = self._clock()
        with self._lock:
            rows = [row for row, until in self._rows.values() if row.caller == caller and until > now]
        return sum(len(row.text) for row in rows)


class RedisJobs:
    """`JobStore` in Redis: a key for each row, which commit.lua writes, and a hash of sizes a caller."""

    def __init__(self, client: RedisClient) -> None:
        from resource_manager.storage.redis.client import load_script  # loads the driver

        self._client = client
        self._put_size = load_script("put_size")

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        found = self._client.texts("jobs:row:", names)
        return {name: text.decode() for name, text in found.items() if text}

    def write(self, rows: Sequence[JobRow]) -> None:
        for row in rows:
            self._client.put((self._key(row.name), row.text, row.keep_s))
            if row.caller is not None:
                sizes_key = self._client.key(f"jobs:of:{row.whose}")
                args = row.name, len(row.text), round(1000 * LIVE_S)
                self._client.run(self._put_size, [sizes_key], args)

    def bytes_of(self, caller: str) -> int:
        sizes_key = self._client.key(f"jobs:of:{digest(caller)}")
        sizes = self._client.hash_of(sizes_key)
        if not sizes:
            return 0
        with self._client.reporting():
            there = self._client.ask(*(("EXISTS", self._key(name.decode())) for name in sizes))
            if gone := [name for name, is_there in zip(sizes, there, strict=True) if not is_there]:
                self._client.ask(("HDEL", sizes_key, *gone))
        return sum(int(size) for size, is_there in zip(sizes.values(), there, strict=True) if is_there)

    def _key(self, name: str) -> str:
        return self._client.key(f"jobs:row:{name}")
