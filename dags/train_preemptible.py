"""A training that another team's guarantee may interrupt: it saves every epoch, waits again, and goes on."""

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator

JOB = Path(__file__).parent / "jobs" / "preemptible.py"

with DAG(
    "train_preemptible",
    description=__doc__,
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    params={"epochs": 200},
    doc_md=__doc__,
) as dag:
    GPUTrainingOperator(
        task_id="train",
        gpus=4,
        cpus=8,
        team="nlp",
        preempt_grace=timedelta(seconds=30),
        command=[sys.executable, str(JOB), "--epochs", "{{ params.epochs }}"],
        env={"OMP_NUM_THREADS": "1"},
    )
