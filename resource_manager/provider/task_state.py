"""Whether Airflow still wants a task, asked from a worker or a trigger."""

from __future__ import annotations

from resource_manager.provider.identity import TaskIdentity

ENDED_STATES = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


def is_wanted(identity: TaskIdentity) -> bool:
    """False once the task ended or its run is gone; a cleared or retried task is still wanted.

    Blocks; call it from a thread where an event loop runs.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=identity.dag_id,
        task_ids=[identity.task_id],
        run_ids=[identity.run_id],
        map_index=identity.map_index,
    )
    of_run = states.get(identity.run_id)
    if not of_run:
        return False
    return next(iter(of_run.values())) not in ENDED_STATES
