"""States of a task in its trigger, and what may follow each of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TaskState(StrEnum):
    """State of a task that has asked for GPUs and left its worker."""

    WAITING = "waiting"
    """Its request is pending, or it has to ask again."""

    STARTING = "starting"
    """It has a lease; its job is prepared, its place is stored, and then it is started."""

    RUNNING = "running"
    """Its job is watched and its lease renewed."""

    PREEMPTED = "preempted"
    """Its lease is taken: the job saves what it did and ends; its request waits again, or the task ends."""

    ENDING = "ending"
    """Its result is known and stored; what is left of the job is removed, and the lease ends."""

    ENDED = "ended"
    """The event fires."""


FOLLOWS: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.WAITING: frozenset(
        {TaskState.STARTING, TaskState.PREEMPTED, TaskState.ENDING, TaskState.ENDED}
    ),
    TaskState.STARTING: frozenset({TaskState.RUNNING, TaskState.WAITING, TaskState.ENDED}),
    TaskState.RUNNING: frozenset({TaskState.PREEMPTED, TaskState.WAITING, TaskState.ENDING, TaskState.ENDED}),
    TaskState.PREEMPTED: frozenset({TaskState.WAITING, TaskState.ENDING, TaskState.ENDED}),
    TaskState.ENDING: frozenset({TaskState.ENDED}),
    TaskState.ENDED: frozenset(),
}
"""States that may follow each state. A trigger that another triggerer starts again begins at WAITING, and
finds where the task is by its request, its lease, the lease's job and its stored result."""
