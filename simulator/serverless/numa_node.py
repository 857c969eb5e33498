"""A NUMA node: containers share its cores, hold its memory, and wait for memory in the order they came."""

from __future__ import annotations

import math
from collections import deque

from simulator.errors import SimulationError
from simulator.serverless.container import Container
from simulator.serverless.errors import MemoryAllocationError
from simulator.serverless.node_records import (
    ExecutionSpeedManager,
    ResourceUtilizationManager,
    thread_speed,
)
from simulator.serverless.prediction import LatestEndBound
from simulator.serverless.shared_cores import SharedCores


class NumaNode:
    """NUMA node with `cpu` cores of `single_core_speed` operations per second and `memory` MiB.

    Between two events of the node (a container starts or ends) a container completes
    floor(speed x seconds) operations; all numbers of operations are integers. Predictions do not round.

    `free_memory` is what no running container uses; `committed_parallelism` are the threads of the running
    and scheduled containers; `latest_end_bound` is an upper bound of their predicted ends. Up to
    `covered_until` (s) the server is rented for sure.
    """

    def __init__(
        self,
        node_id: int,
        cpu: int,
        memory: int,
        single_core_speed: int,
        *,
        name: str = "",
        position: int = 0,
        server_position: int = 0,
    ) -> None:
        self.node_id = node_id
        self.cpu = cpu
        self.memory = memory
        self.single_core_speed = single_core_speed
        self.name = name or str(node_id)
        self.position = position
        self.server_position = server_position
        self.covered_until = 0.0
        self.reset()

    def reset(self) -> None:
        """Empty the node and its records."""
        self.cores = SharedCores(self.cpu, self.single_core_speed)
        self.free_memory = self.memory
        self.committed_parallelism = 0
        self.latest_end_bound = LatestEndBound(self.cpu, self.single_core_speed)
        self.waiting_containers: deque[Container] = deque()
        self._scheduled: dict[Container, None] = {}
        self._ready_time = 0.0
        self.utilization = ResourceUtilizationManager(self.cpu, self.memory, self.single_core_speed)
        self.execution_speeds = ExecutionSpeedManager(self.utilization)

    @property
    def computing_capacity(self) -> int:
        """Operations per second of all cores."""
        return self.cpu * self.single_core_speed

    @property
    def running_containers(self) -> list[Container]:
        """Containers that use memory now, in order of start; their remaining work as of the last event."""
        return self.cores.containers()

    @property
    def scheduled_containers(self) -> list[Container]:
        """Containers not created yet, in the order of their creation times."""
        return sorted(self._scheduled, key=lambda container: container.creation_time)

    @property
    def container_count(self) -> int:
        """Count of containers placed on this node that have not ended."""
        return len(self.running_containers) + len(self.waiting_containers) + len(self._scheduled)

    def predicted_end(self) -> float:
        """Return the predicted end (s) of the last running or scheduled container; -inf if there is none."""
        return max(predict_ends(self).values(), default=-math.inf)

    def tighten_bound(self) -> None:
        """Compute the bound of the predicted ends anew from the containers that the node has now."""
        bound = self.latest_end_bound = LatestEndBound(self.cpu, self.single_core_speed)
        threads = self.committed_parallelism
        for container in self.running_containers:
            bound.extend(container, self.cores.now, container.remaining_computation, threads)
        for container in self.scheduled_containers:
            bound.extend(container, container.creation_time, container.computation, threads)

    def check_memory(self, memory_mib: int, memory_req: int = 0) -> None:
        """Raise `MemoryAllocationError` for more than the node has, or too little to make progress."""
        if memory_mib < 1 or memory_mib * self.single_core_speed < memory_req:
            raise MemoryAllocationError(f"{memory_mib} MiB is too little memory to make progress; give more")
        if memory_mib > self.memory:
            raise MemoryAllocationError(
                f"{memory_mib} MiB is more than the {self.memory} MiB of NUMA node {self.name}"
            )

    # ---- events ----

    def on_server_startup(self, time: float, cold_start_latency: float) -> None:
        """Delay the creation of containers until `time + cold_start_latency`."""
        self._ready_time = time + cold_start_latency

    def on_container_creation(self, container: Container) -> None:
        """Schedule a container that passes `check_memory` for the time when server and data are ready.

        `start` it then.
        """
        ready, submission = self._ready_time, container.function.submission_time
        container.creation_time = (ready if ready > submission else submission) + container.data_transfer_time
        self._scheduled[container] = None
        self._commit(container, container.creation_time)

    def start(self, container: Container) -> None:
        """Create a scheduled container at its time; it starts, or waits for memory."""
        del self._scheduled[container]
        if self.waiting_containers or container.memory_alloc > self.free_memory:
            self.waiting_containers.append(container)
            self.committed_parallelism -= container.parallelism
            return
        self.cores.work_until(container.creation_time)
        self.cores.add(container)
        self.free_memory -= container.memory_alloc
        self.cores.update(self.utilization, self.free_memory)

    def on_container_completion(self) -> Container:
        """Complete and return the container that ends first, and start the waiting ones that fit then.

        Raises `SimulationError` if none can end.
        """
        time = self.cores.earliest_end
        if time == math.inf:
            raise SimulationError(
                f"no container can end on NUMA node {self.name}: none runs, or all have speed 0"
            )
        container = self.cores.end_first()
        container.remaining_computation = 0
        self.free_memory += container.memory_alloc
        self.committed_parallelism -= container.parallelism
        waiting = self.waiting_containers
        while waiting and waiting[0].memory_alloc <= self.free_memory:
            started = waiting.popleft()
            self.cores.add(started)
            self.free_memory -= started.memory_alloc
            self._commit(started, time)
        self.cores.update(self.utilization, self.free_memory)
        return container

    def _commit(self, container: Container, start: float) -> None:
        self.committed_parallelism += container.parallelism
        self.latest_end_bound.extend(container, start, container.computation, self.committed_parallelism)


def predict_ends(node: NumaNode) -> dict[tuple[int, int], float]:
    """Return (workflow, function) -> end in seconds, for running and scheduled containers.

    That is a fluid model without rounding and without further arrivals; it takes time in proportion to the
    square of the containers. A container that waits, or would have to, is left out: its start is unknown.
    Raises `SimulationError` if the containers would never end.
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
