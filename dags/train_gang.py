"""One model of the handwritten digits on four servers: each member trains on a part of each batch."""

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator

JOB = Path(__file__).parent / "jobs" / "gang_digits.py"

with DAG(
    "train_gang", description=__doc__, schedule=None, catchup=False, tags=["gpu", "example"], doc_md=__doc__
) as dag:
    GPUTrainingOperator(
        task_id="train",
        nodes=4,
        gpus=2,
        cpus=4,
        command=[sys.executable, str(JOB)],
        # All servers of the example are one machine; each member uses one of its cores.
        env={"OMP_NUM_THREADS": "1"},
        retries=1,
        retry_delay=timedelta(seconds=10),
    )
