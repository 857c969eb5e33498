"""DAGs of the day, one for each wave, from the plan that `DAY_PLAN` names."""

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, get_parsing_context

from resource_manager.airflow import GPUTrainingOperator
from tests.faults.day import plan

BEAT = Path(plan.__file__).parents[2] / "e2e" / "dags" / "beat.py"
LEDGER = os.environ["LEDGER"]
UNREACHABLE = timedelta(seconds=10 * float(os.environ.get("E2E_TIMEOUT_FACTOR", "1")))
"""Time after which a server counts as out of reach: on a busy machine a server is slow to answer."""

jobs = plan.read(Path(os.environ["DAY_PLAN"]))
wanted = get_parsing_context().dag_id

for wave in range(plan.WAVES):
    dag_id = f"day_{wave:02}"
    of_wave = [job for job in jobs if job.dag_id == dag_id and not job.by_hand]
    if not of_wave or wanted not in (None, dag_id):
        continue
    with DAG(dag_id, schedule=None, catchup=False) as dag:
        for job in of_wave:
            # Servers share the folder, as by a network file system; each member has a file of its own.
            saves_to = f"{LEDGER}-{job.name}-${{GPU_NODE_RANK:-0}}"
            GPUTrainingOperator(
                task_id=job.name,
                command=f"SAVES_TO={saves_to} exec python3 {BEAT} {LEDGER} {job.seconds} 0",
                nodes=job.nodes,
                gpus=job.gpus,
                cpus=1,
                team=job.team,
                priority=job.priority,
                preemptible=job.preemptible,
                preempt_grace=plan.GRACE_S,
                expected_runtime=job.seconds if job.states_runtime else None,
                launcher="ssh" if job.by_ssh else "local",
                launcher_conn_id="day_ssh" if job.by_ssh else None,
                ttl=timedelta(seconds=30),
                unreachable_timeout=UNREACHABLE,
                stale_grace_s=5,
                retries=5,
                retry_delay=timedelta(seconds=1),
                **({"gpu_conn_id": "gpu_service"} if job.by_service else {}),
                env={"BEAT_S": "1", **({"SAVES_FOR_S": str(plan.SAVES_FOR_S)} if job.preemptible else {})},
            )
    globals()[dag_id] = dag
