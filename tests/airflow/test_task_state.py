"""States of task instances by Airflow's execution API."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from resource_manager.airflow.task_state import ExecutionTaskStates

from resource_manager.jobs.task_identity import TaskIdentity


@pytest.fixture
def answer_by(monkeypatch):
    """Return answer_by(function): that one says what Airflow's execution API knows of tasks."""
    return lambda function: monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", function)


def test_a_mapped_task_is_not_confused_with_a_task_of_a_similar_name(answer_by):
    """Airflow's answer names index 1 of a mapped `train` like a task `train_1`, and so on."""
    states = {("train", 1): "running", ("train_1", -1): "success", ("train_1_2", -1): "deferred"}

    def get_task_states(dag_id, *, run_ids, task_ids):
        answer = {
            task_id if number < 0 else f"{task_id}_{number}": state
            for (task_id, number), state in states.items()
            if task_id in task_ids
        }
        assert len(answer) == sum(name in task_ids for name, _ in states), "each key is one task instance"
        return {run_ids[0]: answer}

    answer_by(get_task_states)
    asked = [TaskIdentity("production", "d", "r", *key) for key in states]
    assert ExecutionTaskStates().unfinished(asked) == {asked[0], asked[2]}


def test_all_tasks_of_equal_runs_are_one_question(answer_by):
    """Of three runs, in one of which a task is not wanted, and of a DAG that was deleted."""
    asked = [TaskIdentity("i", "d", f"r{n // 40}", f"t{n % 40}") for n in range(1, 120)]
    deleted = TaskIdentity("i", "gone", "r", "t")
    questions = []

    def get_task_states(dag_id, *, run_ids, task_ids):
        questions.append((dag_id, run_ids, len(task_ids)))
        states = dict.fromkeys(task_ids)
        return {} if dag_id == "gone" else dict.fromkeys(run_ids, states)

    answer_by(get_task_states)
    assert ExecutionTaskStates().unfinished([*asked, deleted]) == {*asked}
    assert questions == [("d", ["r0"], 39), ("d", ["r1", "r2"], 40), ("gone", ["r"], 1)]
