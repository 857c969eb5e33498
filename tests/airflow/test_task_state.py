"""States of task instances by Airflow's execution API."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from resource_manager.airflow.task_state import ExecutionTaskStates

from resource_manager.jobs.task_identity import TaskIdentity


def test_a_mapped_task_is_not_confused_with_a_task_of_a_similar_name(monkeypatch):
    """Airflow's answer names index 1 of a mapped `train` like a task `train_1`."""
    states = {("train", 1): "running", ("train_1", -1): "success"}

    def get_task_states(dag_id, run_ids, task_ids):
        answer = {
            task_id if number < 0 else f"{task_id}_{number}": state
            for (task_id, number), state in states.items()
            if task_id in task_ids
        }
        return {run_ids[0]: answer}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", get_task_states)
    asked = [TaskIdentity("production", "d", "r", *key) for key in states]
    assert ExecutionTaskStates().unfinished(asked) == {asked[0]}
