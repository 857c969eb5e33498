"""Ends of tasks that no worker has collected yet, one Airflow Variable each: Airflow encrypts them.

An end is kept before the lease is released. So if its event is lost, or the worker that collects it, the next
trigger fires it again, also in the next try, and nothing runs twice. XComs do not outlive their try. A
success is kept until Airflow has it: what is left of a try then, such as the XCom with its result, may fail.
"""

from __future__ import annotations

import logging
from typing import Any

from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.task_trigger.events import TaskEnd
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.storage.airflow_variable.access import CurrentAccess
from resource_manager.storage.once import digest

logger = logging.getLogger(__name__)


def keep_end(identity: TaskIdentity, end: TaskEnd) -> TaskEnd:
    """Keep the end, and return it, or the end of that lease that another trigger has kept before.

    Raises `StoreUnavailableError`.
    """
    before = kept_end(identity)
    if before is not None and before.fencing_token == end.fencing_token:
        return before
    known = None if before is None else _text(before)
    CurrentAccess().set(_key(identity), _text(end), known)
    return end


def kept_end(identity: TaskIdentity) -> TaskEnd | None:
    """Return the end that nobody has collected, or None; raises `StoreUnavailableError`."""
    text = CurrentAccess().get(_key(identity))
    return None if text is None else TaskEnd.model_validate_json(text)


def drop_end(identity: TaskIdentity) -> None:
    """Drop the end, if there is one: it was collected, or shall not be."""
    CurrentAccess().delete(_key(identity))


def drop_unwanted(identity: TaskIdentity) -> None:
    """Drop the end of a task that has ended in Airflow: no try will collect it; what fails is only logged."""
    try:
        if not is_wanted(identity):
            drop_end(identity)
    except Exception as error:
        logger.warning("the end of %s is kept until that task is cleared: %s", identity.lease_id, error)


def drop_collected(task_instance: Any, *, once_ended: bool = False) -> None:
    """Drop the end of a task whose worker has collected it; what fails is only logged.

    With `once_ended` only if the task has ended in Airflow, which refuses a success of one that it took from
    the worker meanwhile.
    """
    try:
        identity = TaskIdentity.of(task_instance, instance_id())
        if not once_ended or not is_wanted(identity):
            drop_end(identity)
    except Exception as error:
        logger.warning("the end of this task may be collected again by its next try: %s", error)


def _text(end: TaskEnd) -> str:
    return end.model_dump_json(exclude_defaults=True)


def _key(identity: TaskIdentity) -> str:
    return f"gpu_manager_end_{digest(identity.lease_id)}"
