"""States of a task in its trigger."""

from __future__ import annotations

from enum import StrEnum


class TaskState(StrEnum):
    """State of a task that has asked for GPUs and left its worker.

    A trigger that another triggerer starts again begins at WAITING, and finds where the task is by its
    request, its lease, the lease's job and its stored result.
    """

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
