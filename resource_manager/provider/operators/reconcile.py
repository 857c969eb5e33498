"""`GPUReconcileOperator`: ends what Airflow's tasks left behind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from resource_manager.airflow_instance import instance_id
from resource_manager.errors import ResourceManagerError
from resource_manager.provider.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.provider.task_state import ExecutionTaskStates
from resource_manager.reconcile import reconcile


class GPUReconcileOperator(BaseOperator):
    """Compares this Airflow's leases with its task instances and jobs.

    Returns the `actions` it took, and as `other_instances` how many leases and requests of other Airflows
    on the store it left alone.
    """

    ui_color = "#f4cccc"

    def __init__(self, *, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        try:
            done = reconcile(manager, ExecutionTaskStates(), instance_id())
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        for action in done.actions:
            self.log.info("%s %s: %s", action.action, action.task_id, action.detail)
        if not done.actions:
            self.log.info("every lease of this Airflow belongs to a task that goes on")
        if done.other_instances:
            self.log.info("%d leases and requests of other Airflows were left alone", done.other_instances)
        return asdict(done)
