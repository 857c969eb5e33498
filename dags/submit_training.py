"""Training with the parameters of Airflow's trigger form: an image or a command, and all of a demand."""

from datetime import timedelta

from airflow.sdk import DAG, Param

from resource_manager.airflow import GPUTrainingOperator
from resource_manager.airflow.task_demand import demand_params, demand_templates

with DAG(
    "submit_training",
    description=__doc__,
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    doc_md=__doc__,
    default_args={
        "retries": 2,
        "retry_delay": timedelta(minutes=5),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=30),
    },
    params={
        "command": Param(
            'echo "training on GPUs $CUDA_VISIBLE_DEVICES of $GPU_SERVER"',
            type="string",
            title="Command",
            description="Shell command.",
        ),
        "image": Param("", type=["string", "null"], title="Image", description="Runs in Docker if set."),
        **demand_params(gpus=1, cpus=8),
    },
) as dag:
    GPUTrainingOperator(
        task_id="train",
        command="{{ params.command }}",
        image="{{ params.image or '' }}",
        **demand_templates(),
    )
