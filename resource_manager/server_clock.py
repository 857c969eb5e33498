"""The clock of a server, estimated between its answers by this process's steady clock."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_AGE_S = 30.0
CLOCK_TOLERANCE_S = 1.0
"""A store has a decision that was made at a time further than this from its own made anew."""


class ServerClock:
    """Seconds since the epoch as the server counts them, never by this machine's wall clock.

    `ask` fetches (seconds, microseconds) from the server; it is called when nothing was learnt lately.
    """

    def __init__(self, ask: Callable[[], tuple[int, int]]) -> None:
        self._ask = ask
        self._offset_s = 0.0
        self._learnt_at = float("-inf")

    def now(self) -> float:
        if time.monotonic() - self._learnt_at > MAX_AGE_S:
            begin = time.monotonic()
            self.learn(*self._ask(), begin)
        return time.monotonic() + self._offset_s

    def learn(self, seconds: int, micros: int, begin: float) -> None:
        """Takes the server's time from the answer to a question asked at `begin` of the steady clock."""
        self._learnt_at = time.monotonic()
        self._offset_s = seconds + micros * 1e-6 - (begin + self._learnt_at) / 2
