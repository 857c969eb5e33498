"""DAGs for the fault tests: one job, and one Python task, as the run's configuration says."""

import os
import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task

from resource_manager.provider.operators import GPUTrainingOperator

BEAT = Path(__file__).parent / "beat.py"
LEDGER = os.environ.get("LEDGER", "/dev/null")
PARAMS = {"seconds": 10, "exit_code": 0, "gpus": 8}
TTL = timedelta(seconds=int(os.environ.get("TEST_TTL_S", "15")))


def job_dag(name, **arguments):
    with DAG(name, schedule=None, catchup=False, params=PARAMS, max_active_runs=100) as dag:
        GPUTrainingOperator(
            task_id="job",
            gpus="{{ params.gpus }}",
            cpus=8,
            ttl=TTL,
            retries=2,
            retry_delay=timedelta(seconds=1),
            unreachable_timeout=timedelta(seconds=10),
            **arguments,
        )
    return dag


beat = f"{BEAT} {LEDGER} {{{{ params.seconds }}}} {{{{ params.exit_code }}}}"
local_job = job_dag("local_job", gpu_type="local", command=f"exec {sys.executable} {beat}")
ssh_job = job_dag(
    "ssh_job", gpu_type="ssh", command=f"exec python3 {beat}", launcher="ssh", launcher_conn_id="test_ssh"
)
docker_job = job_dag(
    "docker_job",
    gpu_type="docker",
    image=os.environ.get("TEST_IMAGE", "python:3.11-slim"),
    command=f"exec python3 {beat}",
    container={
        "binds": [f"{Path(LEDGER).parent}:{Path(LEDGER).parent}", f"{BEAT.parent}:{BEAT.parent}"],
        "device_requests": [],
    },
)

with DAG("python_job", schedule=None, catchup=False, params=PARAMS, max_active_runs=100) as python_job:

    @task.gpu(
        gpus="{{ params.gpus }}",
        cpus=8,
        gpu_type="local",
        ttl=TTL,
        retries=2,
        retry_delay=timedelta(seconds=1),
    )
    def job(params=None, ti=None):
        import subprocess

        lease = ti.xcom_pull(task_ids="job", key="allocation")
        environment = {
            **os.environ,
            "GPU_LEASE_ID": lease["task_id"],
            "GPU_SERVER": lease["server_name"],
            "GPU_LEASE_GPUS": os.environ["CUDA_VISIBLE_DEVICES"],
            "GPU_LEASE_FENCING_TOKEN": str(lease["fencing_token"]),
        }
        subprocess.run(
            [sys.executable, str(BEAT), LEDGER, str(params["seconds"]), "0"], env=environment, check=True
        )

    job()
