"""Ends the jobs and leases of tasks that are over, every half minute; switch it on in every installation."""

from datetime import datetime, timedelta

from airflow.sdk import DAG

from resource_manager.provider.operators import GPUReconcileOperator

with DAG(
    "gpu_reconcile",
    schedule=timedelta(seconds=30),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(minutes=10),
    tags=["gpu"],
    doc_md=__doc__,
) as dag:
    GPUReconcileOperator(task_id="reconcile")
