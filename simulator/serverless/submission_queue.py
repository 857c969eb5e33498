"""Workflows of a run, and the queue of functions that wait for a placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from simulator.engine import EventQueue
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import MAX_AMOUNT, WorkflowTemplate
from simulator.serverless.workflow import Function, Workflow


class Workload:
    """Workflows by id, drawn from the templates, and their submitted functions in order of submission.

    `arrival_times` are seconds, one per workflow; `choices` are indexes of templates, one per workflow.
    `submitted` holds the functions submitted and not yet placed, later arrivals included.
    """

    def __init__(
        self, arrival_times: Sequence[float], workflow_templates: Sequence[WorkflowTemplate]
    ) -> None:
        if not len(arrival_times):
            raise WorkflowError("no arrival times: give at least one")
        if not workflow_templates:
            raise WorkflowError("no workflow templates: give at least one")
        for time in arrival_times:
            if not 0 <= time <= MAX_AMOUNT:
                raise WorkflowError(f"an arrival time must be from 0 to {MAX_AMOUNT:,} s, got {time}")
        self.arrival_times = tuple(map(float, arrival_times))
        self.workflow_templates = tuple(workflow_templates)
        self.reset([0] * len(self.arrival_times))

    def reset(self, choices: Sequence[int]) -> None:
        """Restart with these templates, and submit every source function."""
        self.workflows = [
            Workflow(wf_id, arrival, self.workflow_templates[choice])
            for wf_id, (arrival, choice) in enumerate(zip(self.arrival_times, choices, strict=True))
        ]
        self._unfinished_workflows = len(self.workflows)
        self.submitted: EventQueue[Function] = EventQueue()
        self._first_ids = [0, *accumulate(map(len, self.workflows))]
        for workflow in self.workflows:
            for fn_id in workflow.source_functions:
                self._submit(workflow, fn_id, workflow.arrival_time)

    def _submit(self, workflow: Workflow, fn_id: int, time: float) -> None:
        function = workflow.submit_function(fn_id, time)
        self.submitted.schedule(time, function, self._first_ids[workflow.wf_id] + fn_id)

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

    def finish_function(self, wf_id: int, fn_id: int, time: float) -> bool:
        """Mark a function as finished and submit the successors that waited only for it.

        Returns True if it was the last function of its workflow.
        """
        workflow = self.workflows[wf_id]
        for child in workflow.finish_function(fn_id, time):
            # Completions come in order of time, so the last predecessor to end is the latest.
            self._submit(workflow, child, time)
        if workflow.unfinished:
            return False
        self._unfinished_workflows -= 1
        return True
