"""Environment without rewards: a step takes one decision and returns the events until the next."""

from __future__ import annotations

import pickle  # nosec B403
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.errors import SimulationError
from simulator.serverless.cluster import Cluster
from simulator.serverless.config import ClusterConfig
from simulator.serverless.container import Container
from simulator.serverless.errors import ActionError, EpisodeOverError
from simulator.serverless.submission_queue import Workload
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.workflow import Function


class FunctionExecutionRecord(NamedTuple):
    """A function that ended; its start and end in seconds."""

    wf_id: int
    fn_id: int
    start_time: float
    completion_time: float


class WorkflowExecutionRecord(NamedTuple):
    """A workflow that ended, in seconds."""

    wf_id: int
    completion_time: float


class EnvLog(NamedTuple):
    """One decision and the events until the next: MiB, seconds, and dollars of rent."""

    wf_id: int
    fn_id: int
    required_memory: int
    allocated_memory: int
    server_name: str
    server_id: int
    numa_node_id: int
    submission_time: float
    creation_time: float
    cold_start_time: float
    data_transfer_time: float
    finished_function_records: list[FunctionExecutionRecord]
    finished_workflow_records: list[WorkflowExecutionRecord]
    rent: float
    terminated: bool


class RawEnv:
    """Environment whose workflows arrive at `arrival_times` (s), drawn from the templates by `reset`.

    `current_function` is the next function to place; None before the first `reset` and at the end.
    `data_distribution` has (position of the NUMA node, bytes) of the data from each of its predecessors.
    """

    def __init__(
        self,
        arrival_times: Sequence[float],
        workflow_templates: Sequence[WorkflowTemplate],
        cluster_config: ClusterConfig,
    ) -> None:
        self.workload = Workload(arrival_times, workflow_templates)
        self.cluster = Cluster(cluster_config)
        self.current_function: Function | None = None
        self.data_distribution: list[tuple[int, int]] = []
        self._arrivals = sorted(self.workload.arrival_times)
        self._random = np.random.default_rng()
        self._arrived = 0
        self._finished = 0
        self.now = 0.0

    def reset(self, *, seed: int | None = None) -> None:
        """Start an episode; equal seeds draw equal templates."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        templates = self.workload.workflow_templates
        self.workload.reset(self._random.integers(len(templates), size=len(self.workload)).tolist())
        self.cluster.reset()
        self._arrived = 0
        self._finished = 0
        self.take_next_function()

    @property
    def function(self) -> Function:
        """The next function to place; `EpisodeOverError` if there is none."""
        if self.current_function is None:
            raise EpisodeOverError("no function to place: the episode is over, call reset()")
        return self.current_function

    @property
    def active_workflow_count(self) -> int:
        """Count of workflows that have arrived and not finished."""
        return self._arrived - self._finished

    @property
    def submit_queue_length(self) -> int:
        """Count of functions submitted and not yet placed, later arrivals included."""
        return len(self.workload.submitted)

    def step(self, server_name: str, server_id: int, numa_node_id: int, allocated_memory: int) -> EnvLog:
        """Place the current function on a NUMA node with `allocated_memory` MiB.

        Raises `EpisodeOverError` at the end, `ActionError` for a node or amount that does not exist and
        `MemoryAllocationError` for more than the node has; an error changes nothing.
        """
        return self.step_at(self.cluster.position(server_name, server_id, numa_node_id), allocated_memory)

    def step_at(self, position: int, allocated_memory: int) -> EnvLog:
        """Do `step` with the NUMA node given by its position in the cluster."""
        function, cluster = self.function, self.cluster
        if not 0 <= position < len(cluster.nodes):
            raise ActionError(f"no NUMA node at position {position}: there are {len(cluster.nodes)}")
        time, wf_id, fn_id = function.submission_time, function.wf_id, function.fn_id
        cluster.nodes[position].check_memory(allocated_memory, function.memory_req)
        function.memory_alloc = allocated_memory
        cold_start_time = cluster.servers[cluster.server_of[position]].startup_at(time)
        transfer_time = cluster.data_transfer_time(self.data_distribution, position)
        function.position = position
        container = Container(
            wf_id,
            fn_id,
            function.memory_req,
            allocated_memory,
            function.computation,
            function.parallelism,
            time,
            transfer_time,
        )
        rent, started = cluster.on_container_creation(position, container)
        if started:
            self.workload.workflows[wf_id].run_function(fn_id, time)
        functions: list[FunctionExecutionRecord] = []
        workflows: list[WorkflowExecutionRecord] = []
        rent += self._run_until_decision(functions, workflows)
        self.take_next_function()
        terminated = self.current_function is None
        if terminated and not self.workload.completed:
            raise SimulationError("no function can end: none runs, or all have speed 0")
        name, server_id, numa_node_id = cluster.locations[position]
        return EnvLog(
            wf_id,
            fn_id,
            function.memory_req,
            allocated_memory,
            name,
            server_id,
            numa_node_id,
            time,
            container.creation_time,
            cold_start_time,
            transfer_time,
            functions,
            workflows,
            rent,
            terminated,
        )

    def _run_until_decision(
        self, functions: list[FunctionExecutionRecord], workflows: list[WorkflowExecutionRecord]
    ) -> float:
        """Process events up to the next submission, or to the end; return their rent in dollars."""
        workload, runs, submitted = self.workload, self.workload.workflows, self.workload.submitted
        rent = 0.0
        while (event := self.cluster.advance(submitted.next_time)) is not None:
            time, ended, started, due = event
            rent += due
            for container in started:
                runs[container.wf_id].run_function(container.fn_id, time)
            if ended is not None:
                wf_id = ended.wf_id
                functions.append(FunctionExecutionRecord(wf_id, ended.fn_id, ended.start_time, time))
                if workload.finish_function(wf_id, ended.fn_id, time):
                    self._finished += 1
                    workflows.append(WorkflowExecutionRecord(wf_id, time))
                self.now = time
        return rent

    def take_next_function(self) -> None:
        """Take the next function to place from the workload, and move on to its submission."""
        function = self.current_function = self.workload.submitted.pop()
        if function is None:
            self.data_distribution = []
            return
        workflow = self.workload.workflows[function.wf_id]
        functions = workflow.functions
        self.data_distribution = [
            (functions[parent].position, size)
            for parent, size in workflow.template.predecessors[function.fn_id]
        ]
        self.now = time = function.submission_time
        arrivals = self._arrivals
        while self._arrived < len(arrivals) and arrivals[self._arrived] <= time:
            self._arrived += 1

    def snapshot(self) -> bytes:
        """Return the whole state of the episode; equal states give equal roll-outs."""
        return pickle.dumps(self.__dict__)

    def restore(self, snapshot: bytes) -> None:
        """Go back to a snapshot of this environment; read only your own snapshots, they are pickles."""
        self.__dict__.update(pickle.loads(snapshot))  # only the caller's own, as documented  # nosec B301
