"""Training with the parameters of Airflow's trigger form: an image or a command, GPUs, CPUs, and a server."""

from datetime import timedelta

from airflow.sdk import DAG, Param

from resource_manager.airflow import GPUTrainingOperator

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
        "gpus": Param(1, type="integer", minimum=1, title="GPUs", description="Of one server."),
        "cpus": Param(8, type="integer", minimum=1, title="CPUs"),
        "server": Param("", type=["string", "null"], title="Preferred server", description="Its id or name."),
    },
) as dag:
    GPUTrainingOperator(
        task_id="train",
        gpus="{{ params.gpus }}",
        cpus="{{ params.cpus }}",
        command="{{ params.command }}",
        image="{{ params.image or '' }}",
        prefer_server="{{ params.server or '' }}",
    )
