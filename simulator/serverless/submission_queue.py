"""Workflows of a run, and the queue of functions that wait for a placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from simulator.engine import EventQueue
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import MAX_AMOUNT, WorkflowTemplate
from simulator.serverless.workflow import Workflow


class SubmittedFunction(NamedTuple):
    """A function that waits for a placement."""

    submission_time: float
    wf_id: int
    fn_id: int


class Workload:
    """Workflows by id, drawn from the templates, and their submitted functions in order of submission.

    `arrival_times` are seconds, one per workflow; `choices` are indexes of templates, one per workflow.
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
        self._workflows = [
            Workflow(wf_id, arrival, self.workflow_templates[choice])
            for wf_id, (arrival, choice) in enumerate(zip(self.arrival_times, choices, strict=True))
        ]
        self._unfinished_workflows = len(self._workflows)
        self._queue: EventQueue[SubmittedFunction] = EventQueue()
        self._first_ids = [0, *accumulate(map(len, self._workflows))]
        for workflow in self._workflows:
            for fn_id in workflow.source_functions:
                self._submit(workflow, fn_id, workflow.arrival_time)

    def _submit(self, workflow: Workflow, fn_id: int, time: float) -> None:
        wf_id = workflow.wf_id
        workflow.submit_function(fn_id, time)
        self._queue.schedule(time, SubmittedFunction(time, wf_id, fn_id), self._first_ids[wf_id] + fn_id)

    def __len__(self) -> int:
        return len(self._workflows)

    def __getitem__(self, wf_id: int) -> Workflow:
        return self._workflows[wf_id]

    def __iter__(self) -> Iterator[Workflow]:
        return iter(self._workflows)

    @property
    def completed(self) -> bool:
        """True if every workflow has finished."""
        return not self._unfinished_workflows

    @property
    def queue_length(self) -> int:
        """Count of functions submitted and not yet taken by `get`, later arrivals included."""
        return len(self._queue)

    @property
    def next_time(self) -> float:
        """Submission time (s) of the next function to place; infinite if none is in the queue."""
        return self._queue.next_time

    def get(self) -> SubmittedFunction | None:
        """Take the next function to place from the queue; None if there is none."""
        return next(self._queue.pop_due(), None)

    def finish_function(self, wf_id: int, fn_id: int, time: float) -> bool:
        """Mark a function as finished and submit the successors that waited only for it.

        Returns True if it was the last function of its workflow.
        """
        workflow = self._workflows[wf_id]
        for child in workflow.finish_function(fn_id, time):
            # Completions come in order of time, so the last predecessor to end is the latest.
            self._submit(workflow, child, time)
        completed = workflow.completed
        if completed:
            self._unfinished_workflows -= 1
        return completed
