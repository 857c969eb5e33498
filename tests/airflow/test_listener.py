"""What the listener prepares as a component of Airflow starts, and by which connections it ends leases."""

import json
import sys
import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.api_fastapi.execution_api import app as execution_api
    from airflow.api_fastapi.execution_api.app import InProcessExecutionAPI
    from airflow.jobs import triggerer_job_runner
    from airflow.sdk import DAG, BaseOperator
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from resource_manager.airflow import GPUAllocateOperator, gpu_lease, listener

from resource_manager import GPUResourceManager
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.client_errors import ServiceError

TASK = TaskIdentity("production", "etl", "nightly", "train")
ENDED = SimpleNamespace(
    dag_id="etl", run_id="nightly", task_id="train", map_index=-1, id=UUID(int=1), state="failed"
)
CONNECTIONS = ("gpu_manager_default", "gpu_b", "gpu_c")


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


@pytest.fixture
def stores(embedded_redis, monkeypatch):
    """Managers on the stores of three connections, each with a lease under the id of the task."""
    monkeypatch.setenv("GPU_MANAGER_INSTANCE", TASK.instance)
    opened = {}
    for conn_id in CONNECTIONS:
        url = embedded_redis.fresh_url()
        connection = {"conn_type": "gpu_manager", "host": url}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))
        opened[conn_id] = GPUResourceManager.from_url(url, inventory=default_inventory())
    listener.finish()
    yield opened
    listener.finish()
    for manager in opened.values():
        manager.close()


def allocate(stores, **labels):
    for manager in stores.values():
        manager.submit(TASK.lease_id, 2, 1, ttl=60, labels={**TASK.labels, **labels})


def kept_by(stores):
    listener.finish()
    return {conn_id for conn_id, manager in stores.items() if manager.leases()}


@pytest.mark.parametrize("rendered", [{"gpu_conn_id": "gpu_b"}, {"bash_command": "true"}, None])
def test_the_lease_of_a_task_is_ended_by_the_connection_by_which_the_task_asked(stores, rows, rendered):
    allocate(stores)
    rows(TASK, ENDED.id, rendered)
    listener.on_task_instance_failed(None, ENDED, "marked by a user")
    asked_by = (rendered or {}).get("gpu_conn_id", "gpu_manager_default")
    assert kept_by(stores) == {*CONNECTIONS} - {asked_by}


def test_the_leases_of_a_run_are_ended_by_each_connection_that_its_dag_names(stores, rows, caplog):
    """One that cannot be opened keeps the others from nothing."""
    with DAG("etl") as dag:
        for number, conn_id in enumerate(["gpu_away", "gpu_b", "{{ params.store }}"]):
            GPUAllocateOperator(task_id=f"t{number}", gpus=2, gpu_conn_id=conn_id)
    allocate(stores, scope="run")
    run = SimpleNamespace(dag_id="etl", run_id="nightly", state="success", clear_number=0, dag=dag)
    listener.on_dag_run_success(run, "it is over")
    assert kept_by(stores) == {"gpu_c"}
    [said] = [message for message in caplog.messages if "not released here" in message]
    assert "gpu_away" in said


class Token:
    """Manager as a service has it for one team, which may end what that team owns."""

    def __init__(self, manager, team):
        self._manager, self._team = manager, team

    def __getattr__(self, name):
        return getattr(self._manager, name)

    def require_owner(self, entry):
        if entry["owner"] != self._team:
            raise ServiceError(403, f"{entry['task_id']} belongs to {entry['owner']}, not to {self._team}")


@pytest.mark.parametrize("first", ["a", "b"])
def test_the_leases_of_a_run_over_tokens_of_several_teams_are_ended_by_each_of_them(
    monkeypatch, manager, run_row, caplog, first
):
    monkeypatch.setenv("GPU_MANAGER_INSTANCE", TASK.instance)
    run_row("etl", "nightly", 0)
    for team in sorted(["a", "b"], reverse=first == "b"):
        task = replace(TASK, task_id=team)
        manager.submit(task.lease_id, 2, 1, owner=team, labels={**task.labels, "scope": "run"})
    tokens = {"gpu_a": "a", "gpu_b": "b", "gpu_manager_default": "c"}

    @cache
    def hook(conn_id):
        return SimpleNamespace(ask=lambda act: act(Token(manager, tokens[conn_id])))

    monkeypatch.setattr(listener, "_hook", hook)
    with DAG("etl") as dag:
        for conn_id in ("gpu_a", "gpu_b"):
            GPUAllocateOperator(task_id=conn_id, gpus=1, gpu_conn_id=conn_id)
    run = SimpleNamespace(dag_id="etl", run_id="nightly", state="success", clear_number=0, dag=dag)
    listener.on_dag_run_success(run, "it is over")
    listener.finish()
    assert manager.leases() == []
    assert any("not released here" in message and "belongs to" in message for message in caplog.messages)
