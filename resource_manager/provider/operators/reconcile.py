"""`GPUReconcileOperator`: ends what Airflow's tasks left behind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from resource_manager.errors import ResourceManagerError
from resource_manager.provider.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.provider.task_state import ExecutionTaskStates
from resource_manager.reconcile import reconcile


class GPUReconcileOperator(BaseOperator):
    """Compares leases with task instances and jobs; returns what it did, as a list of actions."""

    ui_color = "#f4cccc"

    def __init__(self, *, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any) -> list[dict[str, Any]]:
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        try:
            actions = reconcile(manager, ExecutionTaskStates())
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        for action in actions:
            self.log.info("%s %s: %s", action.action, action.task_id, action.detail)
        if not actions:
            self.log.info("every lease belongs to a task that goes on")
        return [asdict(action) for action in actions]
