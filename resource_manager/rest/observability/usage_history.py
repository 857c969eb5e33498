"""Utilisation, queue and waits over minutes, hours and days, computed from the history."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from resource_manager.rest.answers import Trend
from resource_manager.scheduling.accounting.lives import Lives
from resource_manager.storage.clock import JUMP_S

BIN_S = 60
KEEP_S = 7 * 86_400
MAX_POINTS = 360


@dataclass(slots=True)
class MinuteBucket:
    """One minute: GPU-milli seconds allocated and installed, queue seconds, and waits that ended in it."""

    allocated_milli_s: float = 0.0
    capacity_milli_s: float = 0.0
    queue_s: float = 0.0
    seconds: float = 0.0
    waits: int = 0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0


class UsageHistory:
    """Usage by minute: what a walk over the history says is in use and waits, before each of its changes."""

    def __init__(self) -> None:
        self.bins: OrderedDict[int, MinuteBucket] = OrderedDict()
        self._at: float | None = None

    def advance(self, lives: Lives, now: float) -> None:
        """Count the time since the last change with the leases and the queue of then."""
        if self._at is not None and now < self._at - JUMP_S:  # the store's clock was ahead, and was set back
            self._at = now
            for minute_ahead in [number for number in self.bins if number > now // BIN_S]:
                del self.bins[minute_ahead]
        at = now if self._at is None else max(self._at, now - KEEP_S)
        while at < now:
            end = min((at // BIN_S + 1) * BIN_S, now)
            minute = self._bin(at)
            minute.seconds += end - at
            minute.allocated_milli_s += lives.allocated_milli * (end - at)
            minute.capacity_milli_s += lives.capacity_milli * (end - at)
            minute.queue_s += len(lives.pending) * (end - at)
            at = end
        self._at = now if self._at is None else max(self._at, now)
        while self.bins and next(iter(self.bins)) < (now - KEEP_S) // BIN_S:
            self.bins.popitem(last=False)

    def note_wait(self, at: float, wait_s: float) -> None:
        """Count a wait that a grant ended."""
        minute = self._bin(at)
        minute.waits += 1
        minute.wait_s += wait_s
        minute.longest_wait_s = max(minute.longest_wait_s, wait_s)

    def series(self, lives: Lives, hours: float, now: float) -> Trend:
        """Return up to `MAX_POINTS` points of the last hours."""
        self.advance(lives, now)
        step = max(1, int(-(-hours * 3600 // (BIN_S * MAX_POINTS))))
        last = int(now // BIN_S)
        first = last - int(hours * 3600 // BIN_S) + 1
        points: Trend = {"time": [], "allocated": [], "queue": [], "wait": [], "longest": []}
        for start in range(first, last + 1, step):
            bins = [self.bins[i] for i in range(start, start + step) if i in self.bins]
            capacity = sum(b.capacity_milli_s for b in bins)
            seconds = sum(b.seconds for b in bins)
            waits = sum(b.waits for b in bins)
            points["time"].append(start * BIN_S)
            points["allocated"].append(
                round(100 * sum(b.allocated_milli_s for b in bins) / capacity, 2) if capacity else None
            )
            points["queue"].append(round(sum(b.queue_s for b in bins) / seconds, 2) if seconds else None)
            points["wait"].append(round(sum(b.wait_s for b in bins) / waits, 2) if waits else None)
            points["longest"].append(round(max(b.longest_wait_s for b in bins), 2) if waits else None)
        return points

    def _bin(self, at: float) -> MinuteBucket:
        return self.bins.setdefault(int(at // BIN_S), MinuteBucket())
