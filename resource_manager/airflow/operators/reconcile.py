"""`GPUReconcileOperator` and its DAG, which end the jobs and leases that Airflow's tasks left behind."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator

from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.task_state import ExecutionTaskStates
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.reconcile import reconcile
from resource_manager.jobs.slurm_records import end_left_behind


class GPUReconcileOperator(BaseOperator):
    """Compare this Airflow's leases with its task instances and jobs.

    The task returns the `actions` taken, and as `other_instances` the number of leases and pending requests
    of other Airflow instances on the store, which it leaves unchanged; nothing where it took no action.
    """

    ui_color = "#f4cccc"

    def __init__(self, *, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gpu_conn_id = gpu_conn_id

    def execute(self, context: Any) -> dict[str, Any] | None:
        manager = GPUManagerHook(self.gpu_conn_id, task=self).get_conn()
        try:
            states, instance = ExecutionTaskStates(), instance_id()
            done = reconcile(manager, states, instance)
            on_slurm = end_left_behind(manager, states, instance)
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        for action in on_slurm:  # of the others `reconcile` has told
            self.log.info("%s %s: %s", action.action, action.name, action.detail)
        done.actions.extend(on_slurm)
        if not done.actions:
            self.log.info("every lease of this Airflow belongs to an unfinished task")
        if done.other_instances:
            self.log.info(
                "leases and requests of other Airflow instances, left unchanged: %d", done.other_instances
            )
        return asdict(done) if done.actions else None  # no XCom of each of a million runs a year


def reconcile_dag(
    dag_id: str = "gpu_reconcile",
    *,
    schedule: Any = timedelta(seconds=30),
    gpu_conn_id: str = DEFAULT_CONNECTION,
    **arguments: Any,
) -> DAG:
    """Return a DAG that reconciles regularly, one run at a time; every installation needs it unpaused.

    :param dag_id: id of the DAG.
    :param schedule: interval between two runs, or any schedule of Airflow.
    :param gpu_conn_id: connection of type `gpu_manager`; each that leads to another store needs a DAG.
    :param arguments: further arguments of `DAG`; they override those set here.
    """
    settings: dict[str, Any] = {
        "start_date": datetime(2026, 1, 1, tzinfo=UTC),
        "catchup": False,
        "max_active_runs": 1,
        "dagrun_timeout": timedelta(minutes=10),
        "tags": ["gpu"],
        "description": "Ends the jobs and leases of tasks that have ended",
        "doc_md": "Compares every lease with its Airflow task and its job. If the task has ended or its run "
        "is gone, it stops the job and releases the GPUs; if the task is unfinished, it renews a quarantined "
        "lease.",
    }
    with DAG(dag_id, schedule=schedule, **{**settings, **arguments}) as dag:
        GPUReconcileOperator(task_id="reconcile", gpu_conn_id=gpu_conn_id)
    return dag
