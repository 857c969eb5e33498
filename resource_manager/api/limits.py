"""How often a caller may call, and how often an address may guess a token."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable

from resource_manager.api.problems import ProblemError
from resource_manager.errors import SettingsError

MAX_BODY_BYTES = 1024 * 1024
DEFAULT_RATE = "1000/second"
FAILURES = "20/minute"
PERIODS_S = {"second": 1, "minute": 60, "hour": 3600}


class FixedWindow:
    """Counts hits of each key in windows of equal length; `rate` is such as `1000/second`.

    The counters of a window are dropped when the next one begins, without a thread of their own: what
    libraries do to expire them cost a fifth of an allocation.
    """

    def __init__(self, rate: str, clock: Callable[[], float] = time.monotonic) -> None:
        found = re.fullmatch(r"([1-9]\d{0,8})\s*(?:/|per)\s*(second|minute|hour)", rate.strip())
        if found is None:
            raise SettingsError(
                f"a rate is a number per second, minute or hour, as in 1000/second, not {rate!r}"
            )
        self.rate = rate
        self._most = int(found[1])
        self._period_s = PERIODS_S[found[2]]
        self._clock = clock
        self._lock = threading.Lock()
        self._window = -1
        self._counts: dict[str, int] = {}

    def hit(self, key: str) -> None:
        """Counts; raises 429 above the rate."""
        with self._lock:
            self._turn()
            count = self._counts[key] = self._counts.get(key, 0) + 1
        if count > self._most:
            raise self._too_many()

    def check(self, key: str) -> None:
        """Raises 429 if the rate is used up; counts nothing."""
        with self._lock:
            self._turn()
            count = self._counts.get(key, 0)
        if count >= self._most:
            raise self._too_many()

    def _turn(self) -> None:
        window = int(self._clock() // self._period_s)
        if window != self._window:
            self._window = window
            self._counts = {}

    def _too_many(self) -> ProblemError:
        wait_s = math.ceil((self._window + 1) * self._period_s - self._clock())
        return ProblemError(
            429, f"more than {self.rate}; wait and try again", headers={"Retry-After": str(max(wait_s, 1))}
        )


class Limits:
    """Counts in this process, by caller; the strictest place for them is the proxy in front."""

    def __init__(self, rate: str = DEFAULT_RATE) -> None:
        self._calls = FixedWindow(rate)
        self._failures = FixedWindow(FAILURES)

    def count(self, caller: str) -> None:
        """Raises 429 if the caller is over the limit."""
        self._calls.hit(caller)

    def count_failure(self, address: str) -> None:
        """Notes a wrong token; raises 429 for an address with too many."""
        self._failures.hit(address)

    def check_failures(self, address: str) -> None:
        """Raises 429 for an address that guessed too often."""
        self._failures.check(address)
