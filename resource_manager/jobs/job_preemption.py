"""End of a preempted lease: its jobs are told, then ended, and its request mostly is queued again.

Every step may be repeated by any process, since all of them find the jobs by their keys: the operator does
it, and the reconciler where the operator's process is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from resource_manager.core.changes import JobEnd, Outcome
from resource_manager.core.lease_limits import IDLE, MAX_RUNTIME, OnIdle
from resource_manager.core.maintenance import preemptor_in_words
from resource_manager.jobs.gang_job import GangJob
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.results import ReleaseResult

STEP_S = 5.0
"""Time after which the lease is renewed while its jobs save what they did, or nobody answers for them."""


def grace_of(allocation: Mapping[str, Any]) -> float:
    """Return the seconds that the jobs of a preempted lease have from now: until the end of its preemption.

    The preemption began when it was decided. Jobs that are told late have half of their grace at least.
    """
    grace_s, until = float(allocation["preempt_grace_s"]), float(allocation["until"])
    return min(max(until - time.time(), grace_s / 2), grace_s)


def preemption_order(allocation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the order to tell the job of a preempted lease, as agents take it, without its number."""
    grace_s = round(grace_of(allocation), 1)
    return {"want": "preempt", "grace_s": grace_s, "signal": allocation["preempt_signal"]}


def is_taken(allocation: Mapping[str, Any], were_told: Callable[[], Iterable[bool]]) -> bool:
    """Return whether a lease is being preempted, or one of its jobs was told before that was taken back.

    Only of one that was taken back is asked whether they were told.
    """
    if allocation["preempted_by"] is not None:
        return True
    return allocation["until"] is not None and any(were_told())


def waits_again(allocation: Mapping[str, Any]) -> bool:
    """Return whether the request of a preempted lease waits again; a limit may end its task instead."""
    ends = (_MAX_RUNTIME,) if allocation["on_idle"] == OnIdle.REQUEUE else (_MAX_RUNTIME, _IDLE)
    return allocation["preempted_by"] not in ends


def is_time_over(allocation: Mapping[str, Any]) -> bool:
    """Return whether a preempted lease reached its longest runtime."""
    return bool(allocation["preempted_by"] == _MAX_RUNTIME)


_IDLE, _MAX_RUNTIME = map(preemptor_in_words, (IDLE, MAX_RUNTIME))


def queue_again(
    manager: LeaseService,
    allocation: Mapping[str, Any],
    gang: GangJob | None,
    outcome: Outcome = Outcome.PREEMPTED,
) -> bool:
    """Remove what is left of the jobs and queue the request again, unless a limit ended it for good.

    Returns False if another process has done it. The outcome is that of the lease: `PREEMPTED` or
    `NOT_STARTED`. Raises `LauncherError` if a job may still run: its GPUs must not become free.
    """
    if gang is not None and (left := gang.stop().left):
        raise next(iter(left.values()))
    result = manager.release(
        allocation["task_id"],
        fencing_token=allocation["fencing_token"],
        outcome=outcome,
        job_end=JobEnd.UNKNOWN if gang is None else JobEnd.ENDED,
    )
    return result is ReleaseResult.RELEASED
