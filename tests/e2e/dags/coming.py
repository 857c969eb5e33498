"""DAGs whose tasks ask for GPUs later: in turn, in a branch, mapped, never; and many short ones."""

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


def mapped_jobs(commands, **demand):
    common = {"cpus": 1, "gpu_types": "local", "ttl": TTL, "retries": 3, "retry_delay": timedelta(seconds=1)}
    return GPUTrainingOperator.partial(task_id="job", **common, **demand).expand(command=commands)


with DAG("coming_mapped", schedule=None, catchup=False) as mapped:
    wait("fails", 20, "false") >> mapped_jobs(["true"] * 2000, gpus=8)

with DAG("coming_many", schedule=None, catchup=False) as many:
    wait("prepare", 10) >> mapped_jobs(["sleep 600"] * 2000, gpus=8)

with DAG("coming_deleted", schedule=None, catchup=False) as deleted:
    again = {"retries": 1, "retry_delay": timedelta(hours=1)}
    BashOperator(task_id="prepare", bash_command="false", **again) >> job("train", 1)

with DAG("coming_warm_up", schedule=None, catchup=False) as warm_up:
    mapped_jobs([f"sleep {2 + number % 7}" for number in range(12)], gpus=4)

with DAG("coming_shorts", schedule=None, catchup=False) as shorts:
    mapped_jobs([f"sleep {2 + number * 5 % 7}" for number in range(200)], gpus=4)
