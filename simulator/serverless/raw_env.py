"""Environment without rewards: a step takes one decision and returns the events until the next."""

from __future__ import annotations

import pickle  # nosec B403
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.engine import EventQueue
from simulator.errors import SimulationError
from simulator.serverless.cluster import Cluster, Events
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


_new = tuple.__new__
"""(class, values) -> a named tuple; takes half as long as its class, which counts the values."""


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
        self.events: Events = EventQueue()
        self._arrivals = sorted(self.workload.arrival_times)
        self._random = np.random.default_rng()
        self._finished = 0
        self.now = 0.0

    def reset(self, *, seed: int | None = None) -> None:
        """Start an episode; equal seeds draw equal templates."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        templates = self.workload.workflow_templates
        self.begin(self._random.integers(len(templates), size=len(self.workload)).tolist())

    def begin(self, choices: Sequence[int]) -> None:
        """Start an episode in which the workflows have these templates, given by index."""
        self.events = EventQueue()
        self.workload.reset(choices, self.events, 2 * len(self.cluster.nodes))
        self.cluster.reset(self.events)
        self._finished = 0
        self._run_until_decision([], [])

    @property
    def function(self) -> Function:
        """The next function to place; `EpisodeOverError` if there is none."""
        if self.current_function is None:
            raise EpisodeOverError("no function to place: the episode is over, call reset()")
        return self.current_function

    @property
    def active_workflow_count(self) -> int:
        """Count of workflows that have arrived and not finished."""
        return bisect_right(self._arrivals, self.now) - self._finished

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
        time = function.submission_time
        cluster.nodes[position].check_memory(allocated_memory, function.memory_req)
        function.memory_alloc = allocated_memory
        cold_start_time = cluster.servers[cluster.server_of[position]].startup_at(time)
        transfer_time = cluster.data_transfer_time(self.data_distribution, position)
        function.position = position
        container = Container(function, allocated_memory, transfer_time)
        rent = cluster.on_container_creation(position, container)
        functions: list[FunctionExecutionRecord] = []
        workflows: list[WorkflowExecutionRecord] = []
        rent += self._run_until_decision(functions, workflows)
        terminated = self.current_function is None
        if terminated and not self.workload.completed:
            raise SimulationError("no function can end: none runs, or all have speed 0")
        name, server_id, numa_node_id = cluster.locations[position]
        values = (
            function.wf_id,
            function.fn_id,
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
        return _new(EnvLog, values)

    def _run_until_decision(
        self, functions: list[FunctionExecutionRecord], workflows: list[WorkflowExecutionRecord]
    ) -> float:
        """Process events and take the next function that is submitted, if any; return their rent ($)."""
        events, process, follow = self.events, self.cluster.process, self.workload.follow
        rent = 0.0
        while (event := events.pop()) is not None:
            if isinstance(event, Function):
                self._take(event)
                return rent
            outcome = process(event)
            if outcome is None:
                continue
            ended, due = outcome
            rent += due
            if ended is not None:
                function = ended.function
                self.now = time = events.now
                record = function.wf_id, function.fn_id, function.start_time, time
                functions.append(_new(FunctionExecutionRecord, record))
                if follow(function, time):
                    self._finished += 1
                    workflows.append(WorkflowExecutionRecord(function.wf_id, time))
        self.current_function = None
        self.data_distribution = []
        return rent

    def _take(self, function: Function) -> None:
        """Take a function that is submitted now as the next one to place."""
        self.workload.submitted -= 1
        self.current_function = function
        self.now = function.submission_time
        workflow = self.workload.workflows[function.wf_id]
        functions = workflow.functions
        self.data_distribution = [
            (functions[parent].position, size)
            for parent, size in workflow.template.predecessors[function.fn_id]
        ]

    def snapshot(self) -> bytes:
        """Return the whole state of the episode; equal states give equal roll-outs."""
        return pickle.dumps(self.__dict__)

    def restore(self, snapshot: bytes) -> None:
        """Go back to a snapshot of this environment; read only your own snapshots, they are pickles."""
        self.__dict__.update(pickle.loads(snapshot))  # only the caller's own, as documented  # nosec B301
