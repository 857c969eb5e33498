"""Six models of the handwritten digits at once, each on its own GPUs; not all fit, so some wait."""

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator

JOB = Path(__file__).parent / "jobs" / "digits.py"

MODELS = [
    # GPUs, CPUs, width of the hidden layer, learning rate, epochs
    (8, 16, 64, 0.003, 64),
    (8, 24, 128, 0.001, 56),
    (8, 32, 256, 0.001, 44),
    (6, 32, 512, 0.0005, 12),
    (6, 16, 768, 0.0003, 10),
    (4, 8, 1024, 0.0003, 8),
]

with DAG(
    "train_digits", description=__doc__, schedule=None, catchup=False, tags=["gpu", "example"], doc_md=__doc__
) as dag:
    for gpus, cpus, width, learning_rate, epochs in MODELS:
        GPUTrainingOperator(
            task_id=f"train_{gpus}gpu_{cpus}cpu",
            gpus=gpus,
            cpus=cpus,
            command=[
                sys.executable,
                str(JOB),
                f"--width={width}",
                f"--learning-rate={learning_rate}",
                f"--epochs={epochs}",
            ],
            # All servers of the example are one machine; each job uses one of its cores.
            env={"OMP_NUM_THREADS": "1"},
            retries=1,
            retry_delay=timedelta(seconds=10),
        )
