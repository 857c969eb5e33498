"""Event queue of the simulators: events in order of time, then priority, then sequence of scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

from simulator.errors import SimulationError

Event = TypeVar("Event")


class EventQueue(Generic[Event]):
    """Events to come, and the clock `now` (in the unit of the caller), which never runs backwards.

    Of events at the same time the one with the lower priority comes first; at the same priority, the one
    that was scheduled first. Events themselves are never compared. An event is not taken back: the caller
    ignores one that no longer applies.
    """

    __slots__ = ("_heap", "_sequence", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, int, Event]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """Time of the next event; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def schedule(self, time: float, event: Event, priority: int = 0) -> None:
        """Add an event; one at infinity never happens. Raises `SimulationError` if the time is past."""
        if self.now <= time < inf:
            self._sequence = sequence = self._sequence + 1
            heappush(self._heap, (time, priority, sequence, event))
        elif time != inf:
            raise SimulationError(f"an event at {time} cannot be scheduled at {self.now}: its time is past")

    def pop(self) -> Event | None:
        """Remove and return the next event, with `now` at its time, or None."""
        if not self._heap:
            return None
        self.now, _, _, event = heappop(self._heap)
        return event

    def pop_due(self, until: float = inf) -> Iterator[Event]:
        """Remove and yield, one by one, the events up to and including `until`, with `now` at their time.

        Those scheduled meanwhile are included. When none is left, `now` is `until`, if that is finite.
        """
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, _, event = heappop(heap)
            yield event
        if self.now < until < inf:
            self.now = until
