"""Grid of hyper-parameters: one mapped task for each point, each on its own GPUs."""

import sys
from itertools import product
from pathlib import Path

from airflow.sdk import DAG, task

from resource_manager.airflow import GPUTrainingOperator

JOB = Path(__file__).parent / "jobs" / "digits.py"

with DAG(
    "sweep_digits", description=__doc__, schedule=None, catchup=False, tags=["gpu", "example"], doc_md=__doc__
) as dag:

    @task
    def grid() -> list[list[str]]:
        """Return a command for each point."""
        return [
            [sys.executable, str(JOB), "--epochs=3", f"--width={width}", f"--learning-rate={learning_rate}"]
            for width, learning_rate in product((32, 64), (0.001, 0.003, 0.01))
        ]

    @task
    def best(results: list[dict]) -> dict:
        """Return the result of the most accurate model."""
        return max(results, key=lambda result: result["accuracy"])

    trained = GPUTrainingOperator.partial(
        task_id="train", gpus=2, cpus=4, env={"OMP_NUM_THREADS": "1"}, max_active_tis_per_dagrun=16
    ).expand(command=grid())
    best(trained.output)
