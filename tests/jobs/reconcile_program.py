"""One comparison of leases with an Airflow: python -m tests.jobs.reconcile_program ended | wanted"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from resource_manager import GPUResourceManager
from resource_manager.jobs.reconcile import reconcile
from resource_manager.jobs.task_identity import TaskIdentity
from tests.faults.quick import shorten


class Tasks:
    """An Airflow in which every task has ended, or none has."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        return set(identities) if self._wanted else set()

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        return self._wanted


if __name__ == "__main__":
    shorten()
    with GPUResourceManager() as manager:
        for action in reconcile(manager, Tasks(sys.argv[1] == "wanted"), "test").actions:
            print(f"{action.task_id}: {action.action}, {action.detail}", flush=True)
