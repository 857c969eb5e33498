"""Cores of a NUMA node, shared in equal time slices by the threads of its running containers."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

from simulator.serverless.container import Container
from simulator.serverless.node_records import ResourceUtilizationManager, thread_speed


class EqualContainers:
    """Running containers of the same `rate`: between two events each does the same number of operations.

    `done` counts these operations; an entry is (`done` at its end, number of its start, container), sorted.
    """

    __slots__ = ("done", "entries", "rate", "speed")

    def __init__(self, rate: tuple[int, int], thread: int) -> None:
        self.rate = rate
        self.share(thread)
        self.done = 0
        self.entries: list[tuple[int, int, Container]] = []

    def share(self, thread: int) -> None:
        """Set the speed of each container for that of a thread."""
        numerator, denominator = self.rate
        self.speed = numerator * thread // denominator

    def end_of(self, entry: tuple[int, int, Container], now: float) -> float:
        """Return the end (s) of an entry at the current speed."""
        left = entry[0] - self.done
        if left <= 0:
            return now
        return now + left / self.speed if self.speed else inf


class SharedCores:
    """Running containers of `cpu` cores; speeds and ends are those since the last event, at `now` (s).

    An event costs time in proportion to the different rates of the containers, not to the containers.
    """

    def __init__(self, cpu: int, core_speed: int) -> None:
        self.cpu = cpu
        self.core_speed = core_speed
        self.now = 0.0
        self.parallelism = 0
        self.earliest_end = inf
        self._groups: dict[tuple[int, int], EqualContainers] = {}
        """By rate; only the last one is kept when its last container has ended."""
        self._first: EqualContainers | None = None
        """The group with the container that ends first; None if several have one."""
        self._starts = 0
        self._thread = core_speed
        """Operations per second of a thread."""

    def work_until(self, time: float) -> None:
        """Complete floor(speed x seconds) operations of every container; call `update` after the event."""
        seconds = time - self.now
        if seconds > 0.0:
            for group in self._groups.values():
                group.done += int(group.speed * seconds)
        self.now = time

    def add(self, container: Container) -> None:
        """Start a container now."""
        container.function.run(self.now)
        rate = container.rate
        group = self._groups.get(rate)
        if group is None:
            group = self._groups[rate] = EqualContainers(rate, self._thread)
        self._starts += 1
        insort(group.entries, (group.done + container.computation, self._starts, container))
        self.parallelism += container.parallelism

    def end_first(self) -> Container:
        """Work until `earliest_end` and remove the container that ends then, of several the first started."""
        group, place, time = self._first, 0, self.earliest_end
        if group is None or (len(group.entries) > 1 and group.end_of(group.entries[1], self.now) == time):
            group, place = self._first_started()
        self.work_until(time)
        container = group.entries.pop(place)[2]
        if not group.entries and len(self._groups) > 1:
            del self._groups[group.rate]
        self.parallelism -= container.parallelism
        container.function.finish(time)
        return container

    def _first_started(self) -> tuple[EqualContainers, int]:
        """Return the first started of the containers that end at `earliest_end`: its group and its place."""
        now, time = self.now, self.earliest_end
        found: list[tuple[int, EqualContainers, int]] = []
        for group in self._groups.values():
            entries, place = group.entries, 0
            # Rounding gives more work the same end; equal work is in the order of start.
            while place < len(entries) and group.end_of(entries[place], now) == time:
                found.append((entries[place][1], group, place))
                place = bisect_left(entries, (entries[place][0] + 1,), place)
        return min(found)[1:]

    def update(self, records: ResourceUtilizationManager, free_memory: int) -> None:
        """Set speeds and the earliest end for the containers that run now, and record them."""
        thread = self.core_speed
        if self.parallelism > self.cpu:
            thread = thread_speed(self.cpu, thread, self.parallelism)
        if thread != self._thread:
            self._thread = thread
            for group in self._groups.values():
                group.share(thread)
        now, earliest, first, total = self.now, inf, None, 0
        for group in self._groups.values():
            entries, speed = group.entries, group.speed
            if not entries:
                continue
            total += speed * len(entries)
            left = entries[0][0] - group.done  # `end_of`, inlined
            end = now if left <= 0 else now + left / speed if speed else inf
            if end < earliest:
                earliest, first = end, group
            elif end == earliest:
                first = None
        self.earliest_end = earliest
        self._first = first
        records.add_record(now, total, self.parallelism, free_memory)

    @property
    def latest_end(self) -> float:
        """End (s) of the last container at the current speeds; -inf if none runs."""
        groups = (group for group in self._groups.values() if group.entries)
        return max((group.end_of(group.entries[-1], self.now) for group in groups), default=-inf)

    def containers(self) -> list[Container]:
        """Return the containers in order of start, with their remaining work."""
        running = []
        for group in self._groups.values():
            for target, start, container in group.entries:
                container.remaining_computation = max(0, target - group.done)
                running.append((start, container))
        return [container for _, container in sorted(running, key=lambda each: each[0])]
