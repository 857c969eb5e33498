"""A person decides whether a run may take more GPUs than the team usually has; Airflow 3.1 and later.

*Required actions* in Airflow's user interface shows the question. Without an answer within a day the job does
not start.
"""

from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param, task

from resource_manager.airflow import GPUTrainingOperator

USUAL_GPUS = 2

with DAG(
    "example_gpu_approval",
    description="A person approves a run that asks for more GPUs than usual.",
    schedule=None,
    catchup=False,
    tags=["gpu", "example"],
    doc_md=__doc__,
    params={"gpus": Param(4, type="integer", minimum=1, title="GPUs")},
) as dag:

    @task.branch
    def is_usual(params: dict[str, int] | None = None) -> str:
        return "train" if (params or {})["gpus"] <= USUAL_GPUS else "approve"

    approve = ApprovalOperator(
        task_id="approve",
        subject="May this run take {{ params.gpus }} GPUs?",
        body=f"The team usually takes {USUAL_GPUS}.",
        defaults="Reject",
        response_timeout=timedelta(days=1),
        retries=1,
    )
    train = GPUTrainingOperator(
        task_id="train",
        gpus="{{ params.gpus }}",
        command='echo "training on GPUs $CUDA_VISIBLE_DEVICES"',
        retries=1,
        trigger_rule="none_failed_min_one_success",
    )
    is_usual() >> [approve, train]
    approve >> train
