"""State of functions and workflows during a run: pending, submitted, running, finished."""

from __future__ import annotations

import enum

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
    """Function of a workflow: operations, MiB required and allocated, threads, and its times in seconds."""

    __slots__ = (
        "completion_time",
        "computation",
        "fn_id",
        "memory_alloc",
        "memory_req",
        "parallelism",
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
        self.memory_alloc: int | None = None
        self.submission_time: float | None = None
        self.start_time: float | None = None
        self.completion_time: float | None = None


class Workflow:
    """One run of a template, from its arrival until its last function ends."""

    __slots__ = (
        "_dag",
        "_functions",
        "_unfinished",
        "arrival_time",
        "source_functions",
        "wf_id",
    )

    def __init__(self, wf_id: int, arrival_time: float, template: WorkflowTemplate) -> None:
        self.wf_id = wf_id
        self.arrival_time = arrival_time
        self._dag = template
        self.source_functions = tuple(
            fn_id for fn_id, parents in enumerate(template.predecessors) if not parents
        )
        self.reset()

    def reset(self) -> None:
        """Reset every function to PENDING."""
        dag = self._dag
        wf_id = self.wf_id
        self._functions = [
            Function(wf_id, fn_id, computation, memory_req, parallelism, len(parents))
            for fn_id, (computation, memory_req, parallelism, parents) in enumerate(
                zip(dag.computations, dag.memory_reqs, dag.parallelisms, dag.predecessors, strict=True)
            )
        ]
        self._unfinished = len(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, fn_id: int) -> Function:
        return self._functions[fn_id]

    @property
    def template(self) -> WorkflowTemplate:
        """Template of this workflow."""
        return self._dag

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
        return {function.fn_id for function in self._functions if function.state is state}

    @property
    def completed(self) -> bool:
        """True if every function has finished."""
        return not self._unfinished

    @property
    def completion_time(self) -> float | None:
        """End (s) of the last function; None before that."""
        if not self.completed:
            return None
        return max(function.completion_time or 0.0 for function in self._functions)

    def predecessors(self, fn_id: int) -> tuple[tuple[int, int], ...]:
        """Return (function, bytes) of each parent."""
        return self._dag.predecessors[fn_id]

    def submit_function(self, fn_id: int, time: float) -> None:
        """Change a function from PENDING to SUBMITTED."""
        function = self._functions[fn_id]
        if function.state is not PENDING:
            raise self._misuse(function, PENDING)
        function.state = SUBMITTED
        function.submission_time = time

    def run_function(self, fn_id: int, time: float) -> None:
        """Change a function from SUBMITTED to RUNNING."""
        function = self._functions[fn_id]
        if function.state is not SUBMITTED:
            raise self._misuse(function, SUBMITTED)
        function.state = RUNNING
        function.start_time = time

    def finish_function(self, fn_id: int, time: float) -> list[int]:
        """Change a function from RUNNING to FINISHED; return the successors that are now ready."""
        functions = self._functions
        function = functions[fn_id]
        if function.state is not RUNNING:
            raise self._misuse(function, RUNNING)
        function.state = FINISHED
        function.completion_time = time
        self._unfinished -= 1
        ready = []
        for child in self._dag.successors[fn_id]:
            successor = functions[child]
            successor.unfinished_predecessors -= 1
            if not successor.unfinished_predecessors:
                ready.append(child)
        return ready

    def _misuse(self, function: Function, state: FunctionState) -> WorkflowError:
        return WorkflowError(
            f"function {function.fn_id} of workflow {self.wf_id} is {function.state.value}, not {state.value}"
        )
