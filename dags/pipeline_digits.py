"""Several stages on the same GPUs: a task group that shares one lease, and a Python step with its own."""

import os
import sys
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, task

from resource_manager.airflow import gpu_lease

JOB = Path(__file__).parent / "jobs" / "digits.py"

with DAG(
    "pipeline_digits",
    description=__doc__,
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    doc_md=__doc__,
) as dag:
    with gpu_lease(gpus=4, cpus=8, group_id="on_shared_gpus") as lease:
        stages = [
            BashOperator(
                task_id=stage,
                bash_command=f"{sys.executable} {JOB} --width={width} --learning-rate=0.001 --epochs=2",
                env=lease.environment(),
                append_env=True,
            )
            for stage, width in (("pretrain", 32), ("finetune", 64))
        ]
        stages[0] >> stages[1]

    @task.gpu(gpus=2, cpus=4)
    def evaluate() -> str:
        """Return the GPUs of this task from its environment; it runs in a worker."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    stages[1] >> evaluate()
