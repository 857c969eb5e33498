"""State of functions and workflows during a run: pending, submitted, running, finished."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import inf

from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import WorkflowTemplate


class FunctionState(enum.Enum):
    """States of a function, in the order of its life."""

    PENDING = "pending"
    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"


PENDING, SUBMITTED, RUNNING, FINISHED = FunctionState


@dataclass(slots=True, eq=False)
class Function:
    """Function of a workflow: operations, MiB required and allocated, threads, and its times in seconds.

    `position` is that of its NUMA node in the cluster, -1 before its placement; times to come are infinite.
    """

    wf_id: int
    fn_id: int
    computation: int
    memory_req: int
    parallelism: int
    unfinished_predecessors: int = 0
    state: FunctionState = PENDING
    position: int = -1
    memory_alloc: int | None = None
    submission_time: float = inf
    start_time: float = inf
    completion_time: float = inf

    def submit(self, time: float) -> None:
        """Change the state from PENDING to SUBMITTED; raises `WorkflowError`, as `run` and `finish` do."""
        if self.state is not PENDING:
            raise self._misuse(PENDING)
        self.state = SUBMITTED
        self.submission_time = time

    def run(self, time: float) -> None:
        """Change the state from SUBMITTED to RUNNING."""
        if self.state is not SUBMITTED:
            raise self._misuse(SUBMITTED)
        self.state = RUNNING
        self.start_time = time

    def finish(self, time: float) -> None:
        """Change the state from RUNNING to FINISHED."""
        if self.state is not RUNNING:
            raise self._misuse(RUNNING)
        self.state = FINISHED
        self.completion_time = time

    def _misuse(self, state: FunctionState) -> WorkflowError:
        return WorkflowError(
            f"function {self.fn_id} of workflow {self.wf_id} is {self.state.value}, not {state.value}"
        )


class Workflow:
    """One run of a template, from its arrival until its last function ends."""

    def __init__(self, wf_id: int, arrival_time: float, template: WorkflowTemplate) -> None:
        self.wf_id = wf_id
        self.arrival_time = arrival_time
        self.template = template
        self.source_functions = tuple(
            fn_id for fn_id, parents in enumerate(template.predecessors) if not parents
        )
        demands = zip(template.computations, template.memory_reqs, template.parallelisms, strict=True)
        self.functions = [
            Function(wf_id, fn_id, *demand, len(template.predecessors[fn_id]))
            for fn_id, demand in enumerate(demands)
        ]
        self.unfinished = len(self.functions)

    def __len__(self) -> int:
        return len(self.functions)

    def __getitem__(self, fn_id: int) -> Function:
        return self.functions[fn_id]

    @property
    def pending_functions(self) -> set[int]:
        """Functions whose predecessors have not all ended."""
        return self._in_state(PENDING)

    @property
    def submitted_functions(self) -> set[int]:
        """Functions that wait for a placement, or for their container to start."""
        return self._in_state(SUBMITTED)

    @property
    def running_functions(self) -> set[int]:
        """Functions with a running container."""
        return self._in_state(RUNNING)

    @property
    def finished_functions(self) -> set[int]:
        """Functions that have ended."""
        return self._in_state(FINISHED)

    def _in_state(self, state: FunctionState) -> set[int]:
        return {function.fn_id for function in self.functions if function.state is state}

    def ready_after(self, function: Function) -> list[Function]:
        """Count a function that has ended; return the successors that waited only for it."""
        self.unfinished -= 1
        ready = []
        for child in self.template.successors[function.fn_id]:
            successor = self.functions[child]
            successor.unfinished_predecessors = left = successor.unfinished_predecessors - 1
            if not left:
                ready.append(successor)
        return ready
