"""Airflow's own operators under leases: those that a worker's death meets, and twenty of the providers'."""

import os
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.ssh.operators.ssh import SSHOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.providers.standard.sensors.filesystem import FileSensor
from airflow.sdk import DAG, TaskGroup

from resource_manager.airflow import with_gpus
from tests.airflow.any_operators import OPERATORS

BEAT = Path(__file__).parent / "beat.py"
LEDGER = os.environ.get("LEDGER", "/dev/null")
PARAMS = {"seconds": 3600, "gpus": 8}
COMMAND = f"exec {sys.executable} {BEAT} {LEDGER} {{{{ params.seconds }}}} 0"
ARGUMENTS = {"retries": 4, "retry_delay": timedelta(seconds=1)}


def note_worker(context):
    """Tell the test the process of the task's first try."""
    if context["ti"].try_number == 1:
        Path(f"{LEDGER}-worker-{context['dag'].dag_id}").write_text(str(os.getpid()))


def beat(seconds):
    """Run the job of the ledger in a process of its own, as a training does with its loaders."""
    import subprocess

    subprocess.run([sys.executable, str(BEAT), LEDGER, str(seconds), "0"], check=True)


def leased(operator, kind="local", **more):
    return with_gpus(operator, gpus="{{ params.gpus }}", gpu_types=kind, cpus=8, ttl=15, **more)


with DAG("kept_bash", schedule=None, params=PARAMS, max_active_runs=100) as kept_bash:
    leased(BashOperator)(
        task_id="job",
        bash_command=COMMAND,
        append_env=True,
        env={"OWN": "x"},
        on_execute_callback=note_worker,
        **ARGUMENTS,
    )

with (
    DAG("kept_python", schedule=None, params=PARAMS) as kept_python,
    TaskGroup("group", prefix_group_id=False),
):
    leased(PythonOperator)(
        task_id="job",
        python_callable=beat,
        op_args=["{{ params.seconds }}"],
        on_execute_callback=note_worker,
        **ARGUMENTS,
    )

with DAG("kept_ssh", schedule=None, params=PARAMS) as kept_ssh:
    leased(SSHOperator, "ssh")(
        task_id="job",
        ssh_conn_id="test_ssh",
        command=COMMAND,
        cmd_timeout=3600,
        on_execute_callback=note_worker,
        **ARGUMENTS,
    )

with DAG("kept_deferrable", schedule=None, params=PARAMS) as kept_deferrable:
    leased(FileSensor)(
        task_id="job",
        filepath=f"{LEDGER}-file-{{{{ run_id }}}}",
        poke_interval=1,
        deferrable=True,
        **ARGUMENTS,
    )

with DAG("kept_of_providers", schedule=None, max_active_tasks=4) as kept_of_providers:
    for number, (operator, arguments) in enumerate(OPERATORS.items()):
        with TaskGroup(f"group_{number}"):
            first = with_gpus(operator, gpus=1, gpu_types="local")(task_id="job", **arguments, **ARGUMENTS)
            first >> EmptyOperator(task_id="next")
