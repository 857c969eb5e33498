"""What the listener prepares as a component of Airflow starts."""

import sys
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.api_fastapi.execution_api import app as execution_api
    from airflow.api_fastapi.execution_api.app import InProcessExecutionAPI
    from airflow.jobs import triggerer_job_runner
    from airflow.sdk import DAG, BaseOperator
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from resource_manager.airflow import gpu_lease, listener


class BuiltAtFirstRequest:
    """Web application that is built at its first request, as Airflow's execution API is."""

    is_built = False

    async def __call__(self, scope, receive, send):
        self.is_built = True
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body"})


@pytest.fixture
def api(monkeypatch):
    """Execution API of this process, not built yet."""
    app: Any = BuiltAtFirstRequest()
    monkeypatch.setattr(execution_api, "InProcessExecutionAPI", lambda: InProcessExecutionAPI(app=app))
    monkeypatch.setattr(
        triggerer_job_runner, "in_process_api_server", triggerer_job_runner.in_process_api_server
    )
    return app


@pytest.fixture
def start(monkeypatch):
    """Return start(*words): a component of Airflow starts by that command line."""

    def begin(*words):
        monkeypatch.setattr(sys, "argv", ["airflow", *words])
        listener.on_starting(component=None)

    return begin


def test_a_triggerer_builds_what_it_asks_airflow_by_before_it_runs_triggers(api, start):
    start("triggerer", "--capacity", "500")
    assert api.is_built
    used = triggerer_job_runner.in_process_api_server()
    assert used is triggerer_job_runner.in_process_api_server(), "another one would be built again"
    assert used.app is api


@pytest.mark.parametrize("command", ["scheduler", "api-server", "celery"])
def test_other_components_build_nothing(api, start, command):
    before = triggerer_job_runner.in_process_api_server
    start(command)
    assert not api.is_built
    assert triggerer_job_runner.in_process_api_server is before


def test_a_task_whose_lease_cannot_be_read_goes_on(caplog):
    """Airflow calls no further listener after one that raises."""
    with DAG("d") as dag, gpu_lease(gpus=1):
        BaseOperator(task_id="work")

    class Unanswered(RuntimeTaskInstance):
        def xcom_pull(self, *_, **__):
            raise ConnectionError("no answer")

    fields: dict[str, Any] = {"task": dag.get_task("gpu_lease.work"), "map_index": -1}
    task_instance = Unanswered.model_construct(**fields)
    listener.on_task_instance_running(previous_state=None, task_instance=task_instance)
    assert caplog.messages == ["the process of this task is not known as one of its gpu_lease: no answer"]
