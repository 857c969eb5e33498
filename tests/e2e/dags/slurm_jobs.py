"""Tasks whose jobs Slurm places: one with a command of the run's configuration, and many mapped ones."""

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator

ON_SLURM: dict[str, Any] = {
    "launcher": "slurm",
    "retries": 1,
    "retry_delay": timedelta(seconds=1),
    "preempt_grace": 5,
    "slurm": {"partition": "{{ params.partition }}"},
}

with DAG("slurm_job", params={"command": "true", "partition": "gpu", "gpus": 1, "nodes": 1}):
    GPUTrainingOperator(
        task_id="job",
        gpus="{{ params.gpus }}",
        nodes="{{ params.nodes }}",
        command="{{ params.command }}",
        **ON_SLURM,
    )

with DAG("slurm_mapped", params={"partition": "gpu"}, max_active_tasks=200):
    GPUTrainingOperator.partial(task_id="job", gpus=1, max_active_tis_per_dag=200, **ON_SLURM).expand(
        command=[f"sleep 2; echo {number}" for number in range(100)]
    )
