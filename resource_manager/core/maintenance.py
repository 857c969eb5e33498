"""Maintenance windows: times in which servers take no leases, and which no lease may run into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from resource_manager.core.models import KEY_SEPARATOR

WEEK_S = 7 * 86_400.0

WINDOW = f"{KEY_SEPARATOR}maintenance "
"""Begin of the preemptor that a window is."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window on some servers, from `begin` until `end` in seconds of the store's clock.

    With `every_s` it comes again after that time, for ever. `preempt` ends at its begin what still runs.
    `in_file`: the cluster's file states it, and the next file may leave it out.
    """

    window_id: int
    servers: tuple[str, ...]
    begin: float
    end: float
    every_s: float | None = None
    reason: str = ""
    preempt: bool = False
    in_file: bool = False

    @property
    def preemptor(self) -> str:
        """The id, of no request, for which the window preempts."""
        return f"{WINDOW}{self.window_id}"

    def is_open(self, at: float) -> bool:
        """Return True if servers are under maintenance at that time."""
        found = self.occurrence(at)
        return found is not None and found[0] <= at

    def occurrence(self, at: float) -> tuple[float, float] | None:
        """Return begin and end of the window that is open at that time or comes next; None if it is over."""
        if at < self.end:
            return self.begin, self.end
        if self.every_s is None:
            return None
        shift = (math.floor((at - self.end) / self.every_s) + 1) * self.every_s
        return self.begin + shift, self.end + shift

    def crossed(self, start: float, horizon_s: float) -> tuple[float, float] | None:
        """Return begin and end of the window that a run from `start` for `horizon_s` crosses, or None."""
        found = self.occurrence(start)
        if found is None or (found[0] >= start + horizon_s and found[0] > start):
            return None
        return found


def is_window(preemptor: str) -> bool:
    """Return True if a lease is preempted for a window, not for a request or by a limit."""
    return preemptor.startswith(WINDOW)


def preemptor_in_words(preemptor: str) -> str:
    """Return for what a lease is preempted: the id of a request, `maintenance 3`, or the name of a limit."""
    return preemptor.removeprefix(KEY_SEPARATOR)


def to_the_minute(at: float) -> str:
    """Return the minute of a time as text in UTC, such as `2026-12-01T08:00Z`."""
    return as_text(at - at % 60)


def as_text(at: float) -> str:
    """Return a time as text in UTC, such as `2026-12-01T08:00Z`, to the minute unless it has seconds."""
    on = datetime.fromtimestamp(int(at), UTC)
    return on.isoformat(timespec="seconds" if on.second else "minutes").replace("+00:00", "Z")
