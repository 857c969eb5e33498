"""One job on one GPU, and the DAG that ends leases of lost tasks."""

from datetime import datetime

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator, reconcile_dag

with DAG("train_on_a_gpu", schedule=None, start_date=datetime(2026, 1, 1), description="One GPU, one job"):
    GPUTrainingOperator(
        task_id="train",
        gpus=1,
        cpus=2,
        command="echo training on GPU $GPU_LEASE_GPUS of $GPU_SERVER",  # yours: python train.py
        retries=1,
    )

reconcile_dag()  # ends the leases and jobs of lost tasks: one DAG for each Airflow, switched on
