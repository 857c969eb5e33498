"""A server's clock, estimated between its answers by a clock of this machine that never jumps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

MAX_AGE_S = 30.0
CLOCK_TOLERANCE_S = 1.0
"""Maximum difference of a decision's time from the store's clock; above it the decision is made again."""

JUMP_S = 5.0
"""Difference of two estimates above which the server's clock jumped."""

MAX_SAFETY_S = 0.25
"""Most by which an estimate is set back so that it is not ahead of the server's clock, for answers that took
up to twice this time. A lease that one process sees ended has then ended for its owner, too."""

MAX_DRIFT = 1e-3
"""Difference in the rates of two clocks, by which they part from one answer to the next. Twice what a leap
smear or the kernel's slewing makes of it."""

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


since_boot: Callable[[], float] = partial(time.clock_gettime, _BOOT_CLOCK)
"""Return the seconds since this machine was started, those included in which it was suspended."""


@cache
def boot_id() -> str:
    """Return the id of this start of this machine, which all its processes share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # only Linux tells, and a sandbox may hide it
        return str(round(time.time() - since_boot(), -1))


@dataclass(frozen=True, slots=True)
class ClockJump:
    """A jump of a server's clock, forward if `seconds` is positive.

    It came after `since`, which is by the clock as it is now, and before any machine can have seen the jump.
    """

    seconds: float
    since: float

    def is_known(self, seconds: float, at: float) -> bool:
        """Return whether it is the jump by `seconds` that was seen at `at`."""
        return abs(seconds - self.seconds) <= CLOCK_TOLERANCE_S and at >= self.since


class Reading(NamedTuple):
    """Seconds by which a server's clock was ahead of `steady`, which said `at`, give or take the error."""

    at: float = -math.inf
    ahead_s: float = 0.0
    error_s: float = 0.0

    def jump_since(self, earlier: Reading) -> ClockJump | None:
        """Return the jump that came after an earlier reading on this machine, None for none."""
        moved_s, gap_s = self.ahead_s - earlier.ahead_s, self.at - earlier.at
        tolerance_s = JUMP_S + self.error_s + earlier.error_s + MAX_DRIFT * gap_s
        if gap_s < 0 or abs(moved_s) <= tolerance_s:  # it is the later one, or there was none
            return None
        return ClockJump(moved_s, earlier.at - 2 * earlier.error_s + self.ahead_s - self.error_s)


class ServerClock:
    """Seconds since the epoch by the server's clock, independent of this machine's wall clock.

    `ask` fetches them from the server; it is called if the last answer is too old. `reading` is of the last
    answer, `jump` the last one that was seen. `steady` is a clock that never jumps, in seconds.
    """

    def __init__(self, ask: Callable[[], float], steady: Callable[[], float] = since_boot) -> None:
        self.steady = steady
        self.reading = Reading()
        self.jump: ClockJump | None = None
        self._ask = ask
        self._offset_s = 0.0

    def now(self) -> float:
        at = self.steady()
        if at - self.reading.at > MAX_AGE_S:
            self.learn(self._ask(), at)
            at = self.steady()
        return at + self._offset_s

    def learn(self, server_time: float, begin: float) -> None:
        """Take the server's time from its answer to a question sent at `begin` by the steady clock."""
        end = self.steady()
        if begin < self.reading.at:  # another thread's answer is newer, or as new
            return
        reading = Reading(end, server_time - (begin + end) / 2, (end - begin) / 2)
        self.jump = reading.jump_since(self.reading) or self.jump
        self.reading = reading
        self._offset_s = reading.ahead_s - min(reading.error_s, MAX_SAFETY_S)
