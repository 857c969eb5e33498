"""State of functions and workflows during a run: pending, submitted, running, finished."""

from __future__ import annotations

import enum
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


class Function:
    """Function of a workflow: operations, MiB required and allocated, threads, and its times in seconds.

    `position` is that of its NUMA node in the cluster, -1 before its placement.
    """

    __slots__ = (
        "completion_time",
        "computation",
        "fn_id",
        "memory_alloc",
        "memory_req",
        "parallelism",
        "position",
        "start_time",
        "state",
        "submission_time",
        "unfinished_predecessors",
        "wf_id",
    )

    def __init__(
        self,
        wf_id: int,
        fn_id: int,
        computation: int,
        memory_req: int,
        parallelism: int,
        unfinished_predecessors: int = 0,
    ) -> None:
        self.wf_id = wf_id
        self.fn_id = fn_id
        self.computation = computation
        self.memory_req = memory_req
        self.parallelism = parallelism
        self.unfinished_predecessors = unfinished_predecessors
        self.state = PENDING
        self.position = -1
        self.memory_alloc: int | None = None
        self.submission_time = inf
        self.start_time: float | None = None
        self.completion_time: float | None = None


class Workflow:
    """One run of a template, from its arrival until its last function ends."""

    __slots__ = (
        "arrival_time",
        "functions",
        "source_functions",
        "template",
        "unfinished",
        "wf_id",
    )

    def __init__(self, wf_id: int, arrival_time: float, template: WorkflowTemplate) -> None:
        self.wf_id = wf_id
        self.arrival_time = arrival_time
        self.template = template
        self.source_functions = tuple(
            fn_id for fn_id, parents in enumerate(template.predecessors) if not parents
        )
        self.reset()

    def reset(self) -> None:
        """Reset every function to PENDING."""
        dag = self.template
        wf_id = self.wf_id
        self.functions = [
            Function(wf_id, fn_id, computation, memory_req, parallelism, len(parents))
            for fn_id, (computation, memory_req, parallelism, parents) in enumerate(
                zip(dag.computations, dag.memory_reqs, dag.parallelisms, dag.predecessors, strict=True)
            )
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

    @property
    def completed(self) -> bool:
        """True if every function has finished."""
        return not self.unfinished

    @property
    def completion_time(self) -> float | None:
        """End (s) of the last function; None before that."""
        if not self.completed:
            return None
        return max(function.completion_time or 0.0 for function in self.functions)

    def submit_function(self, fn_id: int, time: float) -> Function:
        """Change a function from PENDING to SUBMITTED, and return it."""
        function = self.functions[fn_id]
        if function.state is not PENDING:
            raise self._misuse(function, PENDING)
        function.state = SUBMITTED
        function.submission_time = time
        return function

    def run_function(self, fn_id: int, time: float) -> None:
        """Change a function from SUBMITTED to RUNNING."""
        function = self.functions[fn_id]
        if function.state is not SUBMITTED:
            raise self._misuse(function, SUBMITTED)
        function.state = RUNNING
        function.start_time = time

    def finish_function(self, fn_id: int, time: float) -> list[int]:
        """Change a function from RUNNING to FINISHED; return the successors that are now ready."""
        functions = self.functions
        function = functions[fn_id]
        if function.state is not RUNNING:
            raise self._misuse(function, RUNNING)
        function.state = FINISHED
        function.completion_time = time
        self.unfinished -= 1
        ready = []
        for child in self.template.successors[fn_id]:
            successor = functions[child]
            successor.unfinished_predecessors = left = successor.unfinished_predecessors - 1
            if not left:
                ready.append(child)
        return ready

    def _misuse(self, function: Function, state: FunctionState) -> WorkflowError:
        return WorkflowError(
            f"function {function.fn_id} of workflow {self.wf_id} is {function.state.value}, not {state.value}"
        )
