"""Airflow's own operators under leases: a command, a mapped one, and a sensor."""

from datetime import timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.sensors.bash import BashSensor
from airflow.sdk import DAG

from resource_manager.airflow import with_gpus

with DAG(
    "example_gpu_operators",
    description="Bash operators and a sensor, each with a lease on GPUs.",
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    doc_md=__doc__,
) as dag:
    train = with_gpus(BashOperator, gpus=1, expected_runtime=timedelta(minutes=10))(
        task_id="train", bash_command='echo "training on GPU $CUDA_VISIBLE_DEVICES"', retries=1
    )
    evaluate = (
        with_gpus(BashOperator, gpus=1)
        .partial(task_id="evaluate", retries=1)
        .expand(bash_command=[f'echo "part {part} on GPU $CUDA_VISIBLE_DEVICES"' for part in (1, 2)])
    )
    look = with_gpus(BashSensor, gpus=1)(
        task_id="look", bash_command='test -n "$GPU_LEASE_ID"', poke_interval=5, retries=1
    )
    train >> evaluate >> look
