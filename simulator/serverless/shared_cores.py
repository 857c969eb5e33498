"""Cores of a NUMA node, shared in equal time slices by the threads of its running containers."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from simulator.serverless.container import Container
from simulator.serverless.node_records import thread_speed


class EqualContainers:
    """Running containers of the same `rate`: between two events each does the same number of operations.

    `done` counts these operations; an entry is (`done` at its end, number of its start, container), sorted.
    `speed` and `first_end` are those since the last event.
    """

    __slots__ = ("done", "entries", "first_end", "rate", "speed")

    def __init__(self, rate: tuple[int, int]) -> None:
        self.rate = rate
        self.speed = 0
        self.first_end = math.inf
        self.done = 0
        self.entries: list[tuple[int, int, Container]] = []

    def end_of(self, entry: tuple[int, int, Container], now: float) -> float:
        """Return the end (s) of an entry at the current speed."""
        left = entry[0] - self.done
        if left <= 0:
            return now
        return now + left / self.speed if self.speed else math.inf


class SharedCores:
    """Running containers of `cpu` cores; speeds and ends are those since the last event, at `now` (s).

    An event costs time in proportion to the different rates of the containers, not to the containers.
    """

    __slots__ = ("_groups", "_starts", "core_speed", "cpu", "earliest_end", "now", "parallelism", "speed")

    def __init__(self, cpu: int, core_speed: int) -> None:
        self.cpu = cpu
        self.core_speed = core_speed
        self.now = 0.0
        self.parallelism = 0
        self.earliest_end = math.inf
        self.speed = 0
        """Operations per second of all containers together."""
        self._groups: dict[tuple[int, int], EqualContainers] = {}
        self._starts = 0

    def work_until(self, time: float) -> None:
        """Complete floor(speed x seconds) operations of every container; call `update` after the event."""
        seconds = time - self.now
        if seconds > 0.0:
            for group in self._groups.values():
                group.done += int(group.speed * seconds)
        self.now = time

    def add(self, container: Container) -> None:
        """Start a container now."""
        container.start_time = self.now
        rate = container.rate
        group = self._groups.get(rate)
        if group is None:
            group = self._groups[rate] = EqualContainers(rate)
        self._starts += 1
        insort(group.entries, (group.done + container.computation, self._starts, container))
        self.parallelism += container.parallelism

    def end_first(self) -> Container:
        """Work until `earliest_end` and remove the container that ends then, of several the first started."""
        now, time = self.now, self.earliest_end
        found: list[tuple[int, int, EqualContainers]] = []
        for group in self._groups.values():
            if group.first_end != time:
                continue
            entries, place = group.entries, 0
            found.append((entries[0][1], 0, group))
            while entries[place][0] != entries[-1][0]:  # equal work is in the order of start
                place = bisect_left(entries, (entries[place][0] + 1,), place)
                if group.end_of(entries[place], now) != time:
                    break
                found.append((entries[place][1], place, group))  # rounding gives more work the same end
        _, place, group = min(found) if len(found) > 1 else found[0]
        self.work_until(time)
        container = group.entries.pop(place)[2]
        if not group.entries:
            del self._groups[group.rate]
        self.parallelism -= container.parallelism
        return container

    def update(self) -> None:
        """Set speeds and the earliest end for the containers that run now."""
        thread = self.core_speed
        if self.parallelism > self.cpu:
            thread = thread_speed(self.cpu, thread, self.parallelism)
        now, earliest, total = self.now, math.inf, 0
        for group in self._groups.values():
            numerator, denominator = group.rate
            group.speed = speed = numerator * thread // denominator
            entries = group.entries
            total += speed * len(entries)
            left = entries[0][0] - group.done  # `end_of`, inlined
            group.first_end = end = now if left <= 0 else now + left / speed if speed else math.inf
            if end < earliest:
                earliest = end
        self.speed = total
        self.earliest_end = earliest

    @property
    def latest_end(self) -> float:
        """End (s) of the last container at the current speeds; -inf if none runs."""
        ends = (group.end_of(group.entries[-1], self.now) for group in self._groups.values())
        return max(ends, default=-math.inf)

    def containers(self) -> list[Container]:
        """Return the containers in order of start, with their remaining work."""
        running = []
        for group in self._groups.values():
            for target, start, container in group.entries:
                container.remaining_computation = max(0, target - group.done)
                running.append((start, container))
        return [container for _, container in sorted(running, key=lambda each: each[0])]
