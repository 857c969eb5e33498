"""States of task instances, read in a worker or a trigger through Airflow's execution API."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from resource_manager.airflow.version_compat import AirflowException
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.airflow_api import ENDED_TASK_STATES
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.task_identity import TaskIdentity, runs_and_tasks

_NUMBERS = re.compile(r"_\d+(?=(?:_\d+)*$)")
"""Each of the numbers at the end of a task id."""


class ExecutionTaskStates:
    """`TaskStates` inside Airflow; its methods block, so an event loop must call them in a thread."""

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        found = set()
        for of_part in _told_apart(identities):
            states: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
            for dag_id, run_ids, task_ids in runs_and_tasks(of_part):
                answer = RuntimeTaskInstance.get_task_states(dag_id, run_ids=run_ids, task_ids=task_ids)
                for run_id, of_run in answer.items():
                    states[dag_id, run_id].update(of_run)
            for identity in of_part:
                suffix = "" if identity.map_index < 0 else f"_{identity.map_index}"
                state = states[identity.dag_id, identity.run_id].get(f"{identity.task_id}{suffix}", "removed")
                if state not in ENDED_TASK_STATES:
                    found.add(identity)
        return found

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        return bool(RuntimeTaskInstance.get_dr_count(dag_id, run_ids=[run_id], states=["queued", "running"]))


def _told_apart(identities: Iterable[TaskIdentity]) -> list[list[TaskIdentity]]:
    """Return the identities in two parts, in each of which a key of Airflow's answer means one task instance.

    A key `train_1` means index 1 of a mapped `train` or the task `train_1`: a name with one number more.
    """
    parts: list[list[TaskIdentity]] = [[], []]
    for identity in identities:
        parts[len(_NUMBERS.findall(identity.task_id)) % 2].append(identity)
    return parts


def identity_of(context: Any) -> TaskIdentity:
    """Return the running task's identity; raises `AirflowException`."""
    try:
        return TaskIdentity.of(context["ti"], instance_id())
    except ResourceManagerError as error:
        raise AirflowException(str(error)) from error


def is_wanted(identity: TaskIdentity) -> bool:
    """Return True if the task instance exists and has not ended, also after a clear or retry."""
    return identity in ExecutionTaskStates().unfinished({identity})
