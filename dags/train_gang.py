"""One model of the handwritten digits on several servers: each trains on a part of every batch.

The servers need addresses in the inventory.
"""

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator

JOB = Path(__file__).parent / "jobs" / "gang_digits.py"

with DAG(
    "train_gang",
    description=__doc__.splitlines()[0],
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    doc_md=__doc__,
    params={"nodes": 4, "gpus": 2},
) as dag:
    GPUTrainingOperator(
        task_id="train_together",
        nodes="{{ params.nodes }}",
        gpus="{{ params.gpus }}",
        cpus=4,
        command=[sys.executable, str(JOB)],
        # All servers of the example are one machine; each member uses one of its cores.
        env={"OMP_NUM_THREADS": "1"},
        retries=1,
        retry_delay=timedelta(seconds=10),
    )
