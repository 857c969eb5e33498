"""DAGs of the day, one for each wave, from the plan that `DAY_PLAN` names."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, get_parsing_context, task

from resource_manager.airflow import GPUTrainingOperator, with_gpus
from tests.faults.day import plan

BEAT = Path(plan.__file__).parents[2] / "e2e" / "dags" / "beat.py"
LEDGER = os.environ["LEDGER"]
UNREACHABLE = timedelta(seconds=10 * float(os.environ.get("E2E_TIMEOUT_FACTOR", "1")))
"""Time after which a server counts as out of reach: on a busy machine a server is slow to answer."""

TRIES: dict[str, Any] = {"retries": 5, "retry_delay": timedelta(seconds=1)}

jobs = plan.read(Path(os.environ["DAY_PLAN"]))
wanted = get_parsing_context().dag_id


def beat(job):
    return f"exec python3 {BEAT} {LEDGER} {job.seconds} 0"


def demand(job):
    return {
        "gpus": job.gpus,
        "cpus": 1,
        "team": job.team,
        "priority": job.priority,
        "expected_runtime": job.seconds if job.states_runtime else None,
    }


def by_operator(job):
    # Servers share the folder, as by a network file system; each member has a file of its own.
    saves_to = f"{LEDGER}-{job.name}-${{GPU_NODE_RANK:-0}}"
    GPUTrainingOperator(
        task_id=job.name,
        command=f"SAVES_TO={saves_to} {beat(job)}",
        nodes=job.nodes,
        gpu_types="A100",
        preemptible=job.preemptible,
        preempt_grace=plan.GRACE_S,
        ttl=timedelta(seconds=30),
        unreachable_timeout=UNREACHABLE,
        stale_grace_s=5,
        **({"gpu_conn_id": "gpu_service"} if job.by_service else {}),
        env={"BEAT_S": "1", **({"SAVES_FOR_S": str(plan.SAVES_FOR_S)} if job.preemptible else {})},
        **demand(job),
        **TRIES,
    )


def by_with_gpus(job):
    with_gpus(BashOperator, gpu_types="local", preemptible=False, ttl=30, **demand(job))(
        task_id=job.name, bash_command=beat(job), env={"BEAT_S": "1"}, append_env=True, **TRIES
    )


def by_task_gpu(job):
    @task.gpu(task_id=job.name, gpu_types="local", preemptible=False, **demand(job), **TRIES)
    def train(seconds):
        command = [sys.executable, str(BEAT), LEDGER, str(seconds), "0"]
        subprocess.run(command, check=True, env={**os.environ, "BEAT_S": "1"})

    train(job.seconds)


def by_slurm(job):
    # Slurm places it: there is no lease, so the ledger is told who it is.
    told = f"BEAT_S=1 GPU_LEASE_ID=slurm/{job.name} GPU_LEASE_FENCING_TOKEN=0"
    GPUTrainingOperator(
        task_id=job.name,
        launcher="slurm",
        gpus=job.gpus,
        cpus=1,
        command=f"export {told}; {beat(job)}",
        **TRIES,
    )


WAYS = {"operator": by_operator, "with_gpus": by_with_gpus, "task_gpu": by_task_gpu, "slurm": by_slurm}

for wave in range(plan.WAVES):
    dag_id = f"day_{wave:02}"
    of_wave = [job for job in jobs if job.dag_id == dag_id and not job.by_hand]
    if not of_wave or wanted not in (None, dag_id):
        continue
    with DAG(dag_id, schedule=None, catchup=False) as dag:
        for job in of_wave:
            WAYS[job.way](job)
    globals()[dag_id] = dag
