"""Predicted ends of the containers of a NUMA node without further arrivals; a fluid model, no rounding."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from simulator.errors import SimulationError
from simulator.serverless.container import Container
from simulator.serverless.node_records import thread_speed


class NodeLoad(Protocol):
    """The part of a NUMA node that determines the ends of its containers."""

    name: str
    cpu: int
    single_core_speed: int

    @property
    def current_time(self) -> float: ...

    @property
    def running_containers(self) -> tuple[Container, ...]: ...

    @property
    def scheduled_containers(self) -> tuple[Container, ...]: ...

    @property
    def waiting_count(self) -> int: ...

    @property
    def free_memory(self) -> int: ...

    @property
    def total_parallelism(self) -> int: ...


def predict_ends(node: NodeLoad) -> dict[str, float]:
    """Return task id -> end in seconds, for running and scheduled containers.

    A container that waits, or would have to, is left out: its start is unknown. Raises `SimulationError`
    if the containers would never end.
    """
    now = node.current_time
    active = [(container, float(container.remaining_computation)) for container in node.running_containers]
    coming = deque(node.scheduled_containers)
    blocked = bool(node.waiting_count)
    free, parallelism = node.free_memory, node.total_parallelism
    ends: dict[str, float] = {}
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
            ends[container.request.lease_id] = now
            free += container.memory_alloc
            parallelism -= container.parallelism
    return ends
