"""Records of a NUMA node: its utilisation, and the speed of each container."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from resource_manager.core.models import Amount
from simulator.serverless.container import Container


class UtilizationRecord(NamedTuple):
    """Utilisation of a NUMA node from `timestamp` (s) until the next record: fractions, threads, MiB."""

    timestamp: float
    cpu: float
    memory: float
    load: float
    total_parallelism: int
    free_memory: int


class SpeedRecord(NamedTuple):
    """Operations per second of a container from `timestamp` (s) until the next record."""

    timestamp: float
    speed: int


class ResourceUtilizationManager:
    """Utilisation of a NUMA node over time, one record per change.

    Records hold sums only, so the cost of adding one is constant.
    """

    __slots__ = ("_cpu", "_memory", "_rows", "_single_core_speed")

    def __init__(self, cpu: int, memory: int, single_core_speed: int) -> None:
        self._cpu = cpu
        self._memory = memory
        self._single_core_speed = single_core_speed
        self.reset()

    def reset(self, timestamp: float = 0.0) -> None:
        """Clear all records: from `timestamp` on the node is idle."""
        self._rows: list[tuple[float, int, int, Amount]] = [(timestamp, 0, 0, self._memory)]

    def clear_after(self, timestamp: float) -> None:
        """Remove the records at and after `timestamp`."""
        rows = self._rows
        while rows and rows[-1][0] >= timestamp:
            rows.pop()

    def add_record(self, timestamp: float, speed: int, total_parallelism: int, free_memory: Amount) -> None:
        """Record the total `speed` (operations per second) from `timestamp` on.

        Records at that time or later are replaced.
        """
        rows = self._rows
        if rows and rows[-1][0] >= timestamp:
            self.clear_after(timestamp)
        rows.append((timestamp, speed, total_parallelism, free_memory))

    @property
    def records(self) -> list[UtilizationRecord]:
        """All records, in order of time."""
        return [
            UtilizationRecord(
                timestamp,
                speed / (self._cpu * self._single_core_speed),
                (self._memory - free) / self._memory,
                parallelism / self._cpu,
                parallelism,
                int(free),
            )
            for timestamp, speed, parallelism, free in self._rows
        ]

    def thread_speeds(self, start: float, end: float) -> list[tuple[float, int]]:
        """Return (timestamp, operations per second of one thread) of the records in [start, end)."""
        first = bisect_left(self._rows, start, key=lambda row: row[0])
        last = bisect_left(self._rows, end, key=lambda row: row[0])
        return [
            (timestamp, thread_speed(self._cpu, self._single_core_speed, parallelism))
            for timestamp, _, parallelism, _ in self._rows[first:last]
        ]


class ExecutionSpeedManager:
    """Speed of each container over time.

    The speed of a container follows from the total parallelism in the utilisation records, so speeds are
    computed on demand and not stored.
    """

    __slots__ = ("_utilization",)

    def __init__(self, utilization: ResourceUtilizationManager) -> None:
        self._utilization = utilization

    def records(self, container: Container) -> list[SpeedRecord]:
        """Return the speeds of a container from its start to its end, or to the latest event."""
        return [
            SpeedRecord(timestamp, container.speed(speed))
            for timestamp, speed in self._utilization.thread_speeds(
                container.function.start_time, container.function.completion_time
            )
        ]

    def get_completed_computation(self, container: Container, until: float) -> int:
        """Return the operations done from the container's start to `until`, floored at every node event."""
        done = 0
        records = self.records(container)
        ends = [record.timestamp for record in records[1:]] + [until]
        for (timestamp, speed), end in zip(records, ends, strict=False):
            done += int(speed * max(0.0, min(end, until) - timestamp))
        return min(done, container.computation)


def thread_speed(cpu: int, single_core_speed: int, total_parallelism: int) -> int:
    """Return the operations per second of one thread: a whole core, or an equal part if there are fewer."""
    if total_parallelism <= cpu:
        return single_core_speed
    return cpu * single_core_speed // total_parallelism
