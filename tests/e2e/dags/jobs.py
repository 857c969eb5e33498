"""DAGs for the fault tests: jobs, a Python task, a sensor and a lease, with parameters of the run."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, get_current_context, task, task_group

from resource_manager.airflow import GPUAvailableSensor, GPUTrainingOperator, gpu_lease

BEAT = Path(__file__).parent / "beat.py"
LEDGER = os.environ.get("LEDGER", "/dev/null")
PARAMS = {"seconds": 3600, "exit_code": 0, "gpus": 8, "linger": ""}
PREEMPT_GRACE_S = 10
TTL = timedelta(seconds=int(os.environ.get("TEST_TTL_S", "15")))


class LingeringOperator(GPUTrainingOperator):
    """Operator whose first try writes its process id to a file, then stays at the step that the run names."""

    def defer(self, *, method_name, **arguments):
        if method_name == "execute_ended":
            linger("asked", get_current_context())
        super().defer(method_name=method_name, **arguments)

    def execute_ended(self, context, event):
        linger("collecting", context)
        result = super().execute_ended(context, event)
        linger("collected", context)
        return result


def linger(place, context):
    if context["params"]["linger"] == place and context["ti"].try_number == 1:
        Path(f"{LEDGER}-{place}").write_text(str(os.getpid()))
        time.sleep(600)


class CountedOperator(GPUTrainingOperator):
    """Operator that writes down each of its runs in a worker."""

    def execute(self, context):
        note_run("execute", context)
        return super().execute(context)

    def resume_execution(self, next_method, next_kwargs, context):
        note_run(next_method, context)
        return super().resume_execution(next_method, next_kwargs, context)


def note_run(method, context):
    with Path(f"{LEDGER}-worker-runs").open("a") as file:
        file.write(f"{context['run_id']} {context['ti'].map_index} {context['ti'].try_number} {method}\n")


def job_dag(name, operator=GPUTrainingOperator, **arguments):
    with DAG(name, schedule=None, catchup=False, params=PARAMS, max_active_runs=100) as dag:
        operator(
            task_id="job",
            gpus="{{ params.gpus }}",
            cpus=8,
            ttl=TTL,
            unreachable_timeout=timedelta(seconds=10),
            **{"retries": 2, "retry_delay": timedelta(seconds=1), **arguments},
        )
    return dag


beat = f"{BEAT} {LEDGER} {{{{ params.seconds }}}} {{{{ params.exit_code }}}}"
local_job = job_dag("local_job", gpu_types="local", command=f"exec {sys.executable} {beat}")
agent_job = job_dag("agent_job", gpu_types="agent", command=f"exec {sys.executable} {beat}")
lingering_job = job_dag(
    "lingering_job",
    LingeringOperator,
    gpu_types="local",
    command=f"exec {sys.executable} {beat}",
    executor=os.environ.get("TEST_EXECUTOR"),
)


def preemptible_dag(name, **arguments):
    with DAG(
        name,
        schedule=None,
        catchup=False,
        params={**PARAMS, "team": "nlp", "priority": 1, "saves_for_s": "2"},
        max_active_runs=100,
    ) as dag:
        GPUTrainingOperator(
            task_id="job",
            gpus="{{ params.gpus }}",
            cpus=8,
            ttl=TTL,
            team="{{ params.team }}",
            priority="{{ params.priority }}",
            preempt_grace=PREEMPT_GRACE_S,
            retries=4,
            retry_delay=timedelta(seconds=1),
            env={"SAVES_FOR_S": "{{ params.saves_for_s }}"},
            **arguments,
        )
    return dag


preemptible_job = preemptible_dag(
    "preemptible_job", gpu_types="local", command=f"exec {sys.executable} {beat}"
)
preemptible_service_job = preemptible_dag(
    "preemptible_service_job",
    gpu_types="local",
    command=f"exec {sys.executable} {beat}",
    gpu_conn_id="gpu_service",
)
# Its turn is 10 s and its grace, though nobody else wants its GPUs.
turn_job = preemptible_dag(
    "turn_job",
    gpu_types="local",
    command=f"exec {sys.executable} {beat}",
    requeue_after=PREEMPT_GRACE_S + 10,
)
# It ends 10 s after its start and its grace; its task's next try goes on with what it saved.
timed_job = preemptible_dag(
    "timed_job",
    gpu_types="local",
    command=f"exec {sys.executable} {beat}",
    max_runtime=PREEMPT_GRACE_S + 10,
)
idle_job = preemptible_dag(
    "idle_job",
    gpu_types="watched",
    command=f"exec {sys.executable} {beat}",
    idle_action="release",
    idle_after=3,
    on_idle="requeue",
)
service_job = job_dag(
    "service_job", gpu_types="local", command=f"exec {sys.executable} {beat}", gpu_conn_id="gpu_service"
)
ssh_job = job_dag(
    "ssh_job",
    gpu_types="ssh",
    command=f"exec python3 {beat}",
    launcher="ssh",
    launcher_conn_id="test_ssh",
    retries=20,  # several tries may fail until the server is back
)
in_container = {
    "gpu_types": "docker",
    "image": os.environ.get("TEST_IMAGE", "python:3.11-slim"),
    "command": f"exec python3 {beat}",
    "container": {
        "binds": [f"{Path(LEDGER).parent}:{Path(LEDGER).parent}", f"{BEAT.parent}:{BEAT.parent}"],
        "device_requests": [],
    },
}
docker_job = job_dag("docker_job", **in_container)
preemptible_docker_job = preemptible_dag("preemptible_docker_job", **in_container)

with DAG("sensor_job", schedule=None, catchup=False, params=PARAMS) as sensor_job:
    GPUAvailableSensor(task_id="job", gpus="{{ params.gpus }}", cpus=8, gpu_types="local", poke_interval=1)

with DAG("service_lease", schedule=None, catchup=False) as service_lease:
    through_service = {"gpus": 8, "cpus": 8, "gpu_types": "local", "gpu_conn_id": "gpu_service"}
    available = GPUAvailableSensor(task_id="available", poke_interval=1, **through_service)
    with gpu_lease(**through_service) as lease:
        step = BashOperator(
            task_id="step",
            bash_command="ls -l /proc/$PPID/fd; echo on $CUDA_VISIBLE_DEVICES of $GPU_SERVER",
            env=lease.environment(),
            append_env=True,
        )
    available >> lease.allocate

with DAG("mapped_leases", schedule=None, catchup=False) as mapped_leases:

    @task_group
    def on_gpus_of_its_own(text):
        with gpu_lease(gpus=2, cpus=2, gpu_types="local") as lease:
            BashOperator(
                task_id="step",
                bash_command="echo $CUDA_VISIBLE_DEVICES",
                env=lease.environment(),
                append_env=True,
            )

    on_gpus_of_its_own.expand(text=["a", "b", "c"])

with DAG("waiting_jobs", schedule=None, catchup=False) as waiting_jobs:
    waiting = GPUTrainingOperator.partial(
        task_id="job", gpus=8, cpus=8, gpu_types="local", ttl=TTL, retries=3
    )
    waiting.expand(command=["true"] * int(os.environ.get("WAITING_JOBS", "200")))

with DAG("short_jobs", schedule=None, catchup=False, params={"seconds": 15}) as short_jobs:
    short = CountedOperator.partial(
        task_id="job",
        gpus=1,
        cpus=8,
        gpu_types="local",
        ttl=timedelta(seconds=120),  # kills take longer than that of the other tests
        retries=3,
        retry_delay=timedelta(seconds=1),
    )
    short.expand(
        command=[f"exec {sys.executable} {BEAT} {LEDGER} {{{{ params.seconds }}}} 0"]
        * int(os.environ.get("SHORT_JOBS", "500"))
    )

with DAG("python_job", schedule=None, catchup=False, params=PARAMS, max_active_runs=100) as python_job:

    @task.gpu(
        gpus="{{ params.gpus }}",
        cpus=8,
        gpu_types="local",
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
            "IGNORES_SIGTERM": "yes",  # like a library in native code
        }
        subprocess.run(
            [sys.executable, str(BEAT), LEDGER, str(params["seconds"]), "0"], env=environment, check=True
        )

    job()
