"""A training job on one GPU that waits for it without a worker, and a step on the GPU of a task of Python."""

from airflow.sdk import DAG, task

from resource_manager.airflow import GPUTrainingOperator

with DAG(
    "example_gpu_training", description=__doc__, schedule=None, catchup=False, tags=["gpu", "example"]
) as dag:
    train = GPUTrainingOperator(
        task_id="train",
        gpus=1,
        command='echo "training on GPU $CUDA_VISIBLE_DEVICES of $GPU_SERVER"',
        retries=1,
    )

    @task.gpu(gpus=1, retries=1)
    def evaluate() -> str:
        import os

        return f"evaluated on GPU {os.environ['CUDA_VISIBLE_DEVICES']}"

    train >> evaluate()
