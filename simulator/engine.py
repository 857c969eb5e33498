"""The event loop of the simulators: a clock and a heap of events, ties broken by order of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Event = Callable[[], object]


class Engine:
    """Runs events in order of (time, order of scheduling); `now` is the simulated clock in seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self._events: list[tuple[float, int, Event]] = []
        self._sequence = count()

    def at(self, time: float, event: Event) -> None:
        """Schedules an event; raises `ValueError` for a time in the past."""
        if time < self.now:
            raise ValueError(f"cannot schedule an event at {time}: the clock stands at {self.now}")
        heapq.heappush(self._events, (time, next(self._sequence), event))

    def run(self, until: float = float("inf")) -> None:
        """Runs events up to and including `until`; with a finite `until` the clock then stands there."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, event = heapq.heappop(events)
            event()
        if until != float("inf"):
            self.now = max(self.now, until)
