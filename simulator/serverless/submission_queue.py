"""Workflows of a run, whose functions are submitted when their predecessors have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from simulator.engine import EventQueue
from simulator.io.rows import MAX_VALUE
from simulator.serverless.cluster import Events
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.workflow import Function, Workflow


class Workload:
    """Workflows by id, drawn from the templates; submissions are events, in the order of the functions.

    `arrival_times` are seconds, one per workflow; `choices` are indexes of templates, one per workflow.
    `submitted` counts the functions submitted and not yet taken, later arrivals included.
    """

    def __init__(
        self, arrival_times: Sequence[float], workflow_templates: Sequence[WorkflowTemplate]
    ) -> None:
        if not len(arrival_times):
            raise WorkflowError("no arrival times: give at least one")
        if not workflow_templates:
            raise WorkflowError("no workflow templates: give at least one")
        for time in arrival_times:
            if not 0 <= time <= MAX_VALUE:
                raise WorkflowError(f"an arrival time must be from 0 to {MAX_VALUE:,} s, got {time}")
        self.arrival_times = tuple(map(float, arrival_times))
        self.workflow_templates = tuple(workflow_templates)
        self.reset([0] * len(self.arrival_times), EventQueue(), 0)

    def reset(self, choices: Sequence[int], events: Events, priority: int) -> None:
        """Restart with these templates, and submit to that queue with priorities from that one on."""
        self.workflows = [
            Workflow(wf_id, arrival, self.workflow_templates[choice])
            for wf_id, (arrival, choice) in enumerate(zip(self.arrival_times, choices, strict=True))
        ]
        self._unfinished_workflows = len(self.workflows)
        self._events = events
        self.submitted = 0
        self._priorities = list(accumulate(map(len, self.workflows), initial=priority))
        """Priority of the first function, by workflow."""
        for workflow in self.workflows:
            for fn_id in workflow.source_functions:
                self._submit(workflow.functions[fn_id], workflow.arrival_time)

    def _submit(self, function: Function, time: float) -> None:
        function.submit(time)
        self.submitted += 1
        self._events.schedule(time, function, self._priorities[function.wf_id] + function.fn_id)

    def __len__(self) -> int:
        return len(self.workflows)

    def __getitem__(self, wf_id: int) -> Workflow:
        return self.workflows[wf_id]

    def __iter__(self) -> Iterator[Workflow]:
        return iter(self.workflows)

    @property
    def completed(self) -> bool:
        """True if every workflow has finished."""
        return not self._unfinished_workflows

    def follow(self, function: Function, time: float) -> bool:
        """Submit the successors that waited only for this function, which has just ended.

        Returns True if it was the last function of its workflow.
        """
        workflow = self.workflows[function.wf_id]
        for successor in workflow.ready_after(function):
            # Completions come in order of time, so the last predecessor to end is the latest.
            self._submit(successor, time)
        if workflow.unfinished:
            return False
        self._unfinished_workflows -= 1
        return True
