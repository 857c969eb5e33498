"""Airflow's own operators under leases: those that a worker's death meets, and twenty of the providers'."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.docker.operators.docker import DockerOperator
from airflow.providers.ssh.operators.ssh import SSHOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.providers.standard.sensors.filesystem import FileSensor
from airflow.providers.standard.sensors.python import PythonSensor
from airflow.sdk import DAG, TaskGroup
from docker.types import Mount

from resource_manager.airflow import with_gpus
from tests.airflow.any_operators import OPERATORS

BEAT = Path(__file__).parent / "beat.py"
LEDGER = os.environ.get("LEDGER", "/dev/null")
PARAMS = {"seconds": 3600}
BEATS = f"{BEAT} {LEDGER} {{{{ params.seconds }}}} 0"
COMMAND = f"exec {sys.executable} {BEATS}"
FOLDERS = [Mount(str(path), str(path), type="bind") for path in (BEAT.parent, Path(LEDGER).parent)]


def note_worker(context):
    """Tell the test the process of the task's first try."""
    if context["ti"].try_number == 1 and context["ti"].map_index < 1:
        Path(f"{LEDGER}-worker-{context['run_id']}").write_text(str(os.getpid()))


ARGUMENTS = {"retries": 4, "retry_delay": timedelta(seconds=1)}
NOTED = {**ARGUMENTS, "on_execute_callback": note_worker}


def beat(seconds=3600):
    """Run the job of the ledger in a process of its own, as a training does with its loaders."""
    return not subprocess.run([sys.executable, str(BEAT), LEDGER, str(seconds), "0"], check=True).returncode


class TrainsOnceFileIsThere(FileSensor):
    """Operator that waits in the triggerer, then works in a worker."""

    def execute(self, context):
        super().execute(context)  # which does not return if it defers
        self.train(context)

    def execute_complete(self, context, event=None):
        super().execute_complete(context, event)
        self.train(context)

    def train(self, context):
        note_worker(context)
        beat()


class OnEngineWithoutGPUs(DockerOperator):
    """Operator that is told its devices, which no engine of a test has."""

    def execute(self, context):
        self.device_requests = []
        return super().execute(context)


def leased(operator, kind, gpus=8, ttl=30):
    return with_gpus(operator, gpus=gpus, gpu_types=kind, cpus=8, ttl=ttl)


def kept(kind):
    return DAG(f"kept_{kind}", schedule=None, params=PARAMS, max_active_runs=100)


with kept("bash") as kept_bash:
    leased(BashOperator, "bash")(
        task_id="job",
        bash_command=COMMAND,
        append_env=True,
        env={"OWN": "x"},
        executor=os.environ.get("TEST_EXECUTOR"),
        **NOTED,
    )

with kept("python") as kept_python, TaskGroup("group", prefix_group_id=False):
    leased(PythonOperator, "python")(
        task_id="job", python_callable=beat, op_args=["{{ params.seconds }}"], **NOTED
    )

with kept("mapped") as kept_mapped:
    leased(PythonOperator, "mapped", gpus=4).partial(task_id="job", python_callable=beat, **NOTED).expand(
        op_kwargs=[{"seconds": "{{ params.seconds }}"}] * 2
    )

with kept("sensor") as kept_sensor:
    leased(PythonSensor, "sensor")(task_id="job", python_callable=beat, **NOTED)

with kept("deferrable") as kept_deferrable:
    leased(TrainsOnceFileIsThere, "deferrable", ttl=120)(  # nobody renews while the triggerer is away
        task_id="job",
        filepath=f"{LEDGER}-file-{{{{ run_id }}}}",
        poke_interval=1,
        deferrable=True,
        **ARGUMENTS,
    )

with kept("ssh") as kept_ssh:
    leased(SSHOperator, "ssh")(
        task_id="job", ssh_conn_id="test_ssh", command=COMMAND, cmd_timeout=3600, **NOTED
    )

with kept("docker") as kept_docker:
    leased(OnEngineWithoutGPUs, "docker")(
        task_id="job",
        image=os.environ.get("TEST_IMAGE", "python:3.11-slim"),
        command=f"python3 {BEATS}",
        mounts=FOLDERS,
        mount_tmp_dir=False,
        auto_remove="force",
        **NOTED,
    )

with DAG("kept_of_providers", schedule=None, max_active_tasks=4) as kept_of_providers:
    after = EmptyOperator(task_id="next", trigger_rule="none_failed")  # which the branching ones name
    for number, (operator, arguments) in enumerate(OPERATORS.items()):
        first = with_gpus(operator, gpus=1, gpu_types="bash")
        first(task_id=f"job_{number}", **arguments, **ARGUMENTS) >> after
