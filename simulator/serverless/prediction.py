"""Predicted ends of the containers of a NUMA node without further arrivals; a fluid model, no rounding.

`predict_ends` is the rule and takes time in proportion to the square of the containers. The rent needs it
only if the cheap `LatestEndBound` does not show that the server is rented for long enough.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from simulator.errors import SimulationError
from simulator.serverless.container import Container
from simulator.serverless.node_records import thread_speed
from simulator.serverless.shared_cores import SharedCores

SLACK = 1.001
"""Factor by which rounding speeds down to integers may delay an end under a bound."""

MIN_THREAD_SPEED = 1001
"""Operations per second of a thread that keep rounding within `SLACK`, if the container's rate is high."""


class NodeLoad(Protocol):
    """The part of a NUMA node that determines the ends of its containers."""

    name: str
    cpu: int
    single_core_speed: int
    free_memory: int
    cores: SharedCores
    waiting_containers: deque[Container]

    @property
    def running_containers(self) -> list[Container]: ...

    @property
    def scheduled_containers(self) -> list[Container]: ...


def predict_ends(node: NodeLoad) -> dict[tuple[int, int], float]:
    """Return (workflow, function) -> end in seconds, for running and scheduled containers.

    A container that waits, or would have to, is left out: its start is unknown. Raises `SimulationError`
    if the containers would never end.
    """
    now = node.cores.now
    active = [(container, float(container.remaining_computation)) for container in node.running_containers]
    coming = deque(node.scheduled_containers)
    blocked = bool(node.waiting_containers)
    free, parallelism = node.free_memory, node.cores.parallelism
    ends: dict[tuple[int, int], float] = {}
    while active or coming:
        thread = thread_speed(node.cpu, node.single_core_speed, parallelism)
        speeds = [container.speed(thread) for container, _ in active]
        left_s = [
            left / speed if speed else math.inf if left else 0.0
            for (_, left), speed in zip(active, speeds, strict=True)
        ]
        first = min(left_s, default=math.inf)
        starting = bool(coming) and coming[0].creation_time < now + first
        if starting and (blocked or coming[0].memory_alloc > free):
            blocked = True
            coming.popleft()  # it will wait, which does not affect the others
            continue
        if first == math.inf and not starting:
            raise SimulationError(
                f"no container can end on NUMA node {node.name}: {parallelism} threads share its cores "
                "and do less than one operation per second; give more memory or a faster core"
            )
        time = coming[0].creation_time if starting else now + first
        active = [
            (container, max(0.0, left - speed * (time - now)))
            for (container, left), speed in zip(active, speeds, strict=True)
        ]
        now = time
        if starting:
            container = coming.popleft()
            active.append((container, float(container.computation)))
            free -= container.memory_alloc
            parallelism += container.parallelism
        else:
            container, _ = active.pop(left_s.index(first))
            ends[container.wf_id, container.fn_id] = now
            free += container.memory_alloc
            parallelism -= container.parallelism
    return ends


class LatestEndBound:
    """Upper bound `latest` (s) of all predicted ends of a node, kept in constant time per event.

    Until the container that ends last has ended, either each of its threads has a core of its own, for as
    long as its work takes alone, or all cores are busy, for at most as long as all work takes on all cores
    (the argument of Graham, Bounds on multiprocessing timing anomalies, 1969). `latest` is the sum of
    both, over the containers since the last `tighten`, and of what rounding down may cost: one operation of
    every container at each event, of which every container has two. It is infinite if threads are so slow
    that rounding their speeds matters.
    """

    def __init__(self, cpu: int, core_speed: int) -> None:
        self._cpu = cpu
        self._core_speed = core_speed
        self._reset()

    def _reset(self) -> None:
        self._alone = -math.inf
        self._all_cores_s = 0.0
        self._slowest = 0.0
        self._threads = 0
        self._events = 0
        self._lost_s = 0.0
        self.latest = -math.inf

    def extend(self, container: Container, start: float, left: int, threads: int) -> None:
        """Include a container that starts at `start` (s) with `left` operations; `threads` counts all."""
        numerator, denominator = container.rate
        slowness = denominator / numerator
        if threads > self._threads or slowness > self._slowest:
            self._slow_down(threads, slowness)
        alone_s = SLACK * slowness * left / self._core_speed
        if start + alone_s > self._alone:
            self._alone = start + alone_s
        self._all_cores_s += alone_s * container.parallelism / self._cpu
        self._events += 2
        self.latest = self._alone + self._all_cores_s + self._events * self._lost_s

    def _slow_down(self, threads: int, slowness: float) -> None:
        self._threads = max(threads, self._threads)
        self._slowest = max(slowness, self._slowest)
        cores_per_thread = self._cpu / max(self._threads, self._cpu)
        if self._core_speed * cores_per_thread < MIN_THREAD_SPEED * (1.0 + self._slowest):
            self._all_cores_s = math.inf
        self._lost_s = SLACK * self._slowest / self._core_speed * (1.0 + self._threads / self._cpu)

    def tighten(self, node: NodeLoad, threads: int) -> None:
        """Compute the bound anew from the containers that the node has now."""
        self._reset()
        for container in node.running_containers:
            self.extend(container, node.cores.now, container.remaining_computation, threads)
        for container in node.scheduled_containers:
            self.extend(container, container.creation_time, container.computation, threads)

    def replace(self, predicted_end: float) -> None:
        """Lower the bound of `tighten` to a prediction made then."""
        self.latest = predicted_end + self._events * self._lost_s
