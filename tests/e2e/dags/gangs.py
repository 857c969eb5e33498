"""DAGs of several servers for the fault tests, and for torchrun and mpirun."""

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from resource_manager.airflow import GPUTrainingOperator
from tests.e2e.lingering_trigger import LingeringTrigger

HERE = Path(__file__).parent
LEDGER = os.environ.get("LEDGER", "/dev/null")
SHOW = "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $GANG_SERVER"
PARAMS = {"seconds": 3600, "exit_code": 0, "nodes": 4}


class LingeringOperator(GPUTrainingOperator):
    """Operator whose first trigger stays between the starts of two members."""

    def defer(self, *, trigger, **arguments):
        super().defer(trigger=LingeringTrigger(**trigger.serialize()[1]), **arguments)


def gang_dag(name, operator=GPUTrainingOperator, **arguments):
    with DAG(name, schedule=None, catchup=False, params=PARAMS, max_active_runs=100) as dag:
        operator(
            **{
                "task_id": "job",
                "gpus": 2,
                "cpus": 2,
                "gpu_types": "gang",
                "launcher": "ssh",
                "launcher_conn_id": "gang_ssh",
                "ttl": timedelta(seconds=int(os.environ.get("TEST_TTL_S", "15"))),
                "unreachable_timeout": timedelta(seconds=10),
                "stale_grace_s": 5,
                "retries": 3,
                "retry_delay": timedelta(seconds=1),
                **arguments,
            }
        )
    return dag


beat = f"exec python3 {HERE}/beat.py {LEDGER} {{{{ params.seconds }}}} {{{{ params.exit_code }}}}"
gang_job = gang_dag("gang_job", nodes="{{ params.nodes }}", command=beat)
lingering_gang = gang_dag("lingering_gang", LingeringOperator, nodes=4, command=beat)
gang_torch = gang_dag(
    "gang_torch", nodes=4, command=f"exec {os.environ.get('TORCHRUN', 'torchrun')} {HERE}/allreduce.py"
)
gang_mpi = gang_dag(
    "gang_mpi",
    nodes=4,
    done_when="rank0",
    startup_order="workers_first",
    command=f"[ $GPU_NODE_RANK = 0 ] || exec sleep 3600; mpirun --hostfile $GPU_HOSTFILE sh -c '{SHOW}'",
    env={
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_args": os.environ.get("MPI_SSH", ""),
    },
)
