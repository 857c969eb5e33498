"""Lease as setup and teardown around a step of Airflow's own Docker operator."""

from airflow.providers.docker.operators.docker import DockerOperator
from airflow.sdk import DAG, Param

from resource_manager.airflow import gpu_lease

with (
    DAG(
        "docker_step",
        description=__doc__,
        schedule=None,
        catchup=False,
        tags=["gpu", "example"],
        doc_md=__doc__,
        params={
            "image": Param("python:3.11-slim", type="string", title="Image", description="With a shell.")
        },
    ) as dag,
    gpu_lease(gpus=2, cpus=4) as lease,
):
    # If NVIDIA's is the engine's default runtime, the container gets the GPUs that this variable names.
    DockerOperator(
        task_id="train",
        image="{{ params.image }}",
        command=["sh", "-c", "echo training on GPUs $NVIDIA_VISIBLE_DEVICES"],
        environment={"NVIDIA_VISIBLE_DEVICES": lease.devices},
        auto_remove="force",
    )
