"""A server's clock, estimated between its answers by this process's steady clock."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_AGE_S = 30.0
CLOCK_TOLERANCE_S = 1.0
"""Maximum difference of a decision's time from the store's clock; above it the decision is made again."""


class ServerClock:
    """Seconds since the epoch by the server's clock, independent of this machine's wall clock.

    `ask` fetches them from the server; it is called if the last answer is too old.
    """

    def __init__(self, ask: Callable[[], float]) -> None:
        self._ask = ask
        self._offset_s = 0.0
        self._learnt_at = float("-inf")

    def now(self) -> float:
        if time.monotonic() - self._learnt_at > MAX_AGE_S:
            begin = time.monotonic()
            self.learn(self._ask(), begin)
        return time.monotonic() + self._offset_s

    def learn(self, told: float, begin: float) -> None:
        """Take the server's time from its answer to a question sent at `begin` by the steady clock."""
        self._learnt_at = time.monotonic()
        self._offset_s = told - (begin + self._learnt_at) / 2
