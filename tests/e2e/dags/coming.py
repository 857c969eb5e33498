"""DAGs whose tasks ask for GPUs later: in turn, in a branch, mapped, never."""

from datetime import timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, task

from resource_manager.airflow import GPUTrainingOperator

TTL = timedelta(seconds=60)


def job(task_id, seconds, **demand):
    return GPUTrainingOperator(
        task_id=task_id,
        command=f"sleep {seconds}",
        **{"gpus": 2, "cpus": 1, "gpu_types": "local", "ttl": TTL, "retries": 0, **demand},
    )


def wait(task_id, seconds, then="true"):
    return BashOperator(task_id=task_id, bash_command=f"sleep {seconds}; {then}")


with DAG("coming_chain", schedule=None, catchup=False) as chain:
    late = {"expected_runtime": timedelta(hours=1), "deadline": timedelta(minutes=10)}
    wait("prepare", 10) >> job("first", 5) >> wait("between", 5) >> job("second", 45, **late)

with DAG("coming_branch", schedule=None, catchup=False) as branch:

    @task.branch
    def choose():
        return "taken"

    choose() >> [wait("taken", 1), job("not_taken", 1)]
    wait("goes_on", 90)

with DAG("coming_mapped", schedule=None, catchup=False) as mapped:
    many = GPUTrainingOperator.partial(task_id="many", gpus=8, cpus=1, gpu_types="local", ttl=TTL)
    wait("fails", 20, "false") >> many.expand(command=["true"] * 100)

with DAG("coming_deleted", schedule=None, catchup=False) as deleted:
    wait("prepare", 600) >> job("train", 1)
