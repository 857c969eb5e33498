"""A NUMA node: containers share its cores in equal time slices and hold its memory as leases."""

from __future__ import annotations

import heapq
import math
from collections import deque
from operator import sub, truediv

from resource_manager.core.changes import Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Node, Placement
from resource_manager.scheduling.allocator import grant
from simulator.errors import SimulationError
from simulator.serverless.container import Container
from simulator.serverless.errors import MemoryAllocationError
from simulator.serverless.node_records import ExecutionSpeedManager, ResourceUtilizationManager, thread_speed
from simulator.serverless.prediction import predict_ends

BOUND_MARGIN_S = 1e-6
"""If a bound is this close to the time in question, the exact prediction decides."""


class NumaNode:
    """NUMA node with `cpu` cores of `single_core_speed` operations per second and `memory` MiB.

    Between two events of the node (a container starts or ends) a container completes
    floor(speed x seconds) operations; all numbers of operations are integers. Predictions do not round.

    `state` is the cluster state whose node `name` holds the memory; by default the node has its own.
    """

    __slots__ = (
        "_bound_parallelism",
        "_bound_thread_speed",
        "_committed_parallelism",
        "_current_time",
        "_earliest",
        "_ends",
        "_esm",
        "_latest_start",
        "_longest_s",
        "_placement",
        "_ready_time",
        "_remaining",
        "_rum",
        "_running_containers",
        "_scheduled",
        "_scheduled_count",
        "_speeds",
        "_state_node",
        "_thread_speed",
        "_total_parallelism",
        "_waiting_containers",
        "cpu",
        "memory",
        "name",
        "node_id",
        "position",
        "server_position",
        "single_core_speed",
        "state",
        "version",
    )

    def __init__(
        self,
        node_id: int,
        cpu: int,
        memory: int,
        single_core_speed: int,
        *,
        state: ClusterState | None = None,
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
        self._placement = Placement(self.name)
        self._rum = ResourceUtilizationManager(cpu, memory, single_core_speed)
        self._esm = ExecutionSpeedManager(self._rum)
        self.reset(state)

    def reset(self, state: ClusterState | None = None) -> None:
        """Empty the node; from now on its memory is held in `state`, by default its own."""
        if state is None:
            state = ClusterState([Node(self.name, 0, {"cpus": self.cpu, "memory_mib": self.memory})])
        self.state = state
        self._state_node = state.node(self.name)
        self._waiting_containers: deque[Container] = deque()
        self._scheduled: list[tuple[float, int, Container]] = []
        self._scheduled_count = 0
        # Parallel lists, in order of start; `_ends` are the ends at the current speeds.
        self._running_containers: list[Container] = []
        self._remaining: list[int] = []
        self._speeds: list[int] = []
        self._ends: list[float] = []
        self._earliest = math.inf
        self._total_parallelism = 0
        # Running and scheduled containers: their threads, and the terms of the bound on their latest end.
        self._committed_parallelism = 0
        self._bound_parallelism = 0
        self._bound_thread_speed = 0
        self._longest_s = 0.0
        self._latest_start = -math.inf
        self._thread_speed = self.single_core_speed
        self._current_time = 0.0
        self._ready_time = 0.0
        self._rum.reset()
        self.version = 0

    # ---- reading ----

    @property
    def computing_capacity(self) -> int:
        """Operations per second of all cores."""
        return self.cpu * self.single_core_speed

    @property
    def utilization(self) -> ResourceUtilizationManager:
        """Utilisation of the node over time."""
        return self._rum

    @property
    def execution_speeds(self) -> ExecutionSpeedManager:
        """Speed of each container over time."""
        return self._esm

    @property
    def running_containers(self) -> tuple[Container, ...]:
        """Containers that hold memory now, in order of start; their remaining work as of the last event."""
        for container, left in zip(self._running_containers, self._remaining, strict=True):
            container.remaining_computation = left
        return tuple(self._running_containers)

    @property
    def waiting_containers(self) -> tuple[Container, ...]:
        """Containers that were created and wait for memory, in queue order (FIFO)."""
        return tuple(self._waiting_containers)

    @property
    def scheduled_containers(self) -> tuple[Container, ...]:
        """Containers not created yet, in the order of their creation times."""
        return tuple(container for _, _, container in sorted(self._scheduled))

    @property
    def free_memory(self) -> int:
        """MiB that no running container holds."""
        return int(self._state_node.free["memory_mib"])

    @property
    def total_parallelism(self) -> int:
        """Threads of the running containers."""
        return self._total_parallelism

    @property
    def committed_parallelism(self) -> int:
        """Threads of the running and scheduled containers."""
        return self._committed_parallelism

    @property
    def waiting_count(self) -> int:
        """Count of containers that wait for memory."""
        return len(self._waiting_containers)

    @property
    def outlook(self) -> tuple[float, float]:
        """Ends (s) of the first and the last running container at the current speeds; 0 if none runs."""
        return (min(self._ends), max(self._ends)) if self._ends else (0.0, 0.0)

    @property
    def container_count(self) -> int:
        """Count of containers placed on this node that have not ended."""
        return len(self._running_containers) + len(self._waiting_containers) + len(self._scheduled)

    @property
    def current_time(self) -> float:
        """Time (s) of the node's latest event."""
        return self._current_time

    def ends_by(self, time: float) -> bool:
        """Return True if every running or scheduled container ends by `time` without further arrivals.

        Three tests, each more expensive and more exact than the one before: a bound updated with every
        new container, the same bound recomputed, and the full prediction.
        """
        sure = time - BOUND_MARGIN_S
        latest = sure - self._longest_s
        if self._current_time <= latest and self._latest_start <= latest:
            return True
        if self._scheduled:
            self._recompute_bound(self._committed_parallelism)
            latest = sure - self._longest_s
            if self._current_time <= latest and self._latest_start <= latest:
                return True
        elif max(self._ends, default=-math.inf) <= sure:
            return True
        return self.predicted_end() <= time

    def predicted_end(self) -> float:
        """Return the predicted end (s) of the last running or scheduled container; -inf if there is none."""
        return max(predict_ends(self).values(), default=-math.inf)

    @property
    def earliest_end(self) -> float:
        """End (s) of the first running container; infinite if none runs."""
        return self._earliest

    def next_event(self) -> tuple[float, bool]:
        """Return the time of the next start (True) or end (False); at equal times, ends come first."""
        if self._scheduled and self._scheduled[0][0] < self._earliest:
            return self._scheduled[0][0], True
        return self._earliest, False

    # ---- the bound on the latest end ----

    def _commit(self, container: Container) -> None:
        """Extend the bound for a container that will run: assume the speed with all of them together."""
        self._committed_parallelism += container.parallelism
        if self._committed_parallelism > self._bound_parallelism:
            # Twice as many threads as now, so that the next containers need no recomputation.
            self._recompute_bound(2 * self._committed_parallelism)
        speed = container.share * self._bound_thread_speed // container.memory_req
        seconds = container.computation / speed if speed else math.inf
        if seconds > self._longest_s:
            self._longest_s = seconds
        if container.creation_time > self._latest_start:
            self._latest_start = container.creation_time

    def _recompute_bound(self, parallelism: int) -> None:
        self._bound_parallelism = parallelism
        thread = self._bound_thread_speed = thread_speed(self.cpu, self.single_core_speed, parallelism)
        work = list(zip(self._remaining, self._running_containers, strict=True))
        work += [(container.computation, container) for _, _, container in self._scheduled]
        self._longest_s = max(
            (left / speed if (speed := container.speed(thread)) else math.inf for left, container in work),
            default=0.0,
        )
        self._latest_start = max(self._scheduled)[0] if self._scheduled else -math.inf

    # ---- events ----

    def check_memory(self, memory_mib: int, memory_req: int = 0) -> None:
        """Raise `MemoryAllocationError` for more than the node has, or too little to make progress."""
        if memory_mib * self.single_core_speed < max(1, memory_req):
            raise MemoryAllocationError(f"{memory_mib} MiB is too little memory to make progress; give more")
        if memory_mib > self.memory:
            raise MemoryAllocationError(
                f"{memory_mib} MiB is more than the {self.memory} MiB of NUMA node {self.name}"
            )

    def on_server_startup(self, time: float, cold_start_latency: float) -> None:
        """Delay the creation of containers until `time + cold_start_latency`."""
        self._ready_time = time + cold_start_latency

    def on_container_creation(self, container: Container) -> None:
        """Schedule the container for the time when server and data are ready; reserve memory only then.

        Raises `MemoryAllocationError` if it requests more than the node has.
        """
        self.check_memory(container.memory_alloc)
        ready, submission = self._ready_time, container.submission_time
        container.creation_time = (ready if ready > submission else submission) + container.data_transfer_time
        self._commit(container)
        self._scheduled_count += 1
        heapq.heappush(self._scheduled, (container.creation_time, self._scheduled_count, container))
        self.version += 1

    def start_next(self) -> Container | None:
        """Create the next scheduled container; return it if it starts, None if it has to wait for memory."""
        time, _, container = heapq.heappop(self._scheduled)
        self.version += 1
        if self._waiting_containers or container.memory_alloc > self._state_node.free["memory_mib"]:
            self._waiting_containers.append(container)
            self._committed_parallelism -= container.parallelism
            return None
        self._update_remaining_computations(time)
        self._run(container, time)
        self._update_completion_times()
        return container

    def on_container_completion(self) -> tuple[Container, list[Container]]:
        """Complete the container that ends first; return it and the waiting ones that start now.

        Scheduled containers with an earlier start are started first. Raises `SimulationError` if none runs.
        """
        while self._scheduled and self._scheduled[0][0] < self._earliest:
            self.start_next()
        if self._earliest == math.inf:
            raise SimulationError(
                f"no container can end on NUMA node {self.name}: none runs, or all have speed 0"
            )
        time = self._earliest
        index = self._ends.index(time)
        self._update_remaining_computations(time)
        container = self._running_containers.pop(index)
        del self._remaining[index], self._speeds[index]
        container.completion_time = time
        container.remaining_computation = 0
        self._total_parallelism -= container.parallelism
        self._committed_parallelism -= container.parallelism
        self.state.apply(Released(container.request.lease_id, container.fencing_token, time))
        started = self._run_waiting_containers(time) if self._waiting_containers else []
        self._update_completion_times()
        self.version += 1
        return container, started

    def _run(self, container: Container, time: float) -> None:
        granted = grant(self.state, container.request, self._placement, time)
        self.state.apply(granted)
        container.fencing_token = granted.lease.fencing_token
        container.start_time = time
        self._running_containers.append(container)
        self._remaining.append(container.computation)
        self._speeds.append(container.share * self._thread_speed // container.memory_req)
        self._total_parallelism += container.parallelism

    def _run_waiting_containers(self, time: float) -> list[Container]:
        """Start containers from the head of the queue; the first that does not fit blocks the queue."""
        started = []
        waiting = self._waiting_containers
        while waiting and waiting[0].memory_alloc <= self._state_node.free["memory_mib"]:
            container = waiting.popleft()
            self._commit(container)
            self._run(container, time)
            started.append(container)
        return started

    def _update_remaining_computations(self, time: float) -> None:
        """Subtract the operations done since the last event from the remaining ones."""
        seconds = time - self._current_time
        if seconds > 0.0 and self._remaining:
            done = map(int, [speed * seconds for speed in self._speeds])
            self._remaining = [left if left > 0 else 0 for left in map(sub, self._remaining, done)]
        self._current_time = time

    def _update_completion_times(self) -> None:
        """Update speeds and ends for the current total parallelism, and add a record."""
        parallelism = self._total_parallelism
        speed = thread_speed(self.cpu, self.single_core_speed, parallelism)
        if speed != self._thread_speed:
            self._thread_speed = speed
            self._speeds = [c.share * speed // c.memory_req for c in self._running_containers]
        now = self._current_time
        free_memory = self._state_node.free["memory_mib"]
        if not self._remaining:
            self._ends, self._earliest = [], math.inf
            self._rum.add_record(now, 0, parallelism, free_memory)
            return
        try:
            ends = [now + seconds for seconds in map(truediv, self._remaining, self._speeds)]
        except ZeroDivisionError:
            ends = [
                now + (left / speed if speed else math.inf if left else 0.0)
                for left, speed in zip(self._remaining, self._speeds, strict=True)
            ]
        self._ends = ends
        self._earliest = min(ends)
        self._rum.add_record(now, sum(self._speeds), parallelism, free_memory)
