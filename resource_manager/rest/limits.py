"""Limits of a caller: calls in a time and at once, and failed log-ins by address."""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from resource_manager.errors import SettingsError
from resource_manager.rest.problems import ProblemError

MAX_BODY_BYTES = 1024 * 1024
MAX_FORM_BYTES = 64 * 1024
DEFAULT_RATE = "1000/second"
DEFAULT_THREADS = 16
SHARE = 4
"""One caller's calls run in at most one of so many threads: the others go on for the others."""

APART = {
    "/livez": "live",
    "/readyz": "ready",
    "/healthz": "ready",
    **dict.fromkeys(("/api/renew", "/api/renew/batch", "/api/release"), "leases"),
    **dict.fromkeys(("/api/reports", "/api/agent/jobs", "/api/agent/logs"), "agents"),
}
"""Path -> the threads that answer it and nothing else.

A look at a silent store keeps nobody from seeing life, and however many read, leases are kept and servers
are not taken for silent.
"""

THREADS_APART = {"live": 2, "ready": 2, "leases": 4, "agents": 4}

FAILURES = "20/minute"
PERIODS_S = {"second": 1, "minute": 60, "hour": 3600}


@functools.lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return what counts as one address: of IPv4 itself, of IPv6 the network (/64) that one host has."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    return str(found) if isinstance(found, IPv4Address) else str(ip_network((int(found), 64), strict=False))


class FixedWindow:
    """Counter of hits by key in windows of equal length; `rate` reads like `1000/second`.

    What a hit exceeds the rate by, as a large batch does, is taken off the next windows. The counters of a
    window are dropped when the next one begins. This needs no thread: the expiry of counters in libraries
    took a fifth of the time of an allocation.
    """

    def __init__(self, rate: str, clock: Callable[[], float] = time.monotonic) -> None:
        found = re.fullmatch(r"([1-9]\d{0,8})\s*(?:/|per)\s*(second|minute|hour)", rate.strip())
        if found is None:
            raise SettingsError(
                f"a rate must be a number per second, minute or hour, as in 1000/second, got {rate!r}"
            )
        self.rate = rate
        self._most = int(found[1])
        self._period_s = PERIODS_S[found[2]]
        self._clock = clock
        self._lock = threading.Lock()
        self._window = -1
        self._counts: dict[str, int] = {}

    def hit(self, key: str, hits: int = 1) -> None:
        """Count hits of the key; raise 429, counting nothing, if its rate is used up."""
        with self._lock:
            self._turn()
            count = self._counts.get(key, 0)
            if count < self._most:
                self._counts[key] = count + hits
        if count >= self._most:
            wait_s = math.ceil((self._window + count // self._most) * self._period_s - self._clock())
            detail = f"the limit of {self.rate} is exceeded: wait and try again"
            raise ProblemError(429, detail, retry_after_s=max(wait_s, 1))

    def is_used_up(self, key: str) -> bool:
        """Return whether another hit of the key would raise 429; count nothing."""
        with self._lock:
            self._turn()
            return self._counts.get(key, 0) >= self._most

    def _turn(self) -> None:
        window = int(self._clock() // self._period_s)
        if window != self._window:
            paid = self._most * (window - self._window)
            self._counts = {key: count - paid for key, count in self._counts.items() if count > paid}
            self._window = window


class Limits:
    """Limits of one process; a limit over all processes belongs in the proxy in front."""

    def __init__(
        self,
        rate: str = DEFAULT_RATE,
        threads: int = DEFAULT_THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = FixedWindow(rate, clock)
        self._failures = FixedWindow(FAILURES, clock)
        self._most_at_once = max(threads // SHARE, 1)
        self._guard = threading.Lock()
        self._running: dict[str, int] = {}

    def count(self, caller: str, items: int = 1) -> None:
        """Count a call, or items of one; raise 429 if the caller is over the limit."""
        self._calls.hit(caller, items)

    @contextmanager
    def running(self, caller: str, waits: bool = False, path: str = "") -> Iterator[None]:
        """Run a call of that caller inside; raise 429 if a quarter of the threads run their calls already.

        Half of those at most may be calls that wait. Calls of a path with threads of its own count
        apart, up to half of these.
        """
        group, most = APART.get(path), self._most_at_once
        if group is not None:
            caller, most = f"{group} {caller}", THREADS_APART[group] // 2
        half = max(most // 2, 1)
        waiting = self._turn(f"waiting {caller}", half) if waits else nullcontext()
        with self._turn(caller, most), waiting:
            yield

    @contextmanager
    def _turn(self, caller: str, most: int) -> Iterator[None]:
        with self._guard:
            at_once = self._running.get(caller, 0)
            if at_once >= most:
                detail = f"{at_once} of your calls are being answered, the most at once: try again"
                raise ProblemError(429, detail, retry_after_s=0)  # most calls take milliseconds
            self._running[caller] = at_once + 1
        try:
            yield
        finally:
            with self._guard:
                self._running[caller] -= 1
                if not self._running[caller]:
                    del self._running[caller]

    def count_failure(self, address: str) -> None:
        """Count a wrong token; raise 429 for an address with too many."""
        self._failures.hit(address)

    def is_locked_out(self, address: str) -> bool:
        """Return whether an address has sent too many wrong tokens; count nothing."""
        return self._failures.is_used_up(address)
