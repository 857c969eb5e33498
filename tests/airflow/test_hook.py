"""Hook: connections of a store or of the service, and the console on the store of the tasks."""

import asyncio
import json
import os
import subprocess
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.builders import present

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse

    from resource_manager.airflow import hook, listener
    from resource_manager.airflow.hook import GPUManagerHook
    from resource_manager.airflow.sensors import GPUAvailableSensor
    from resource_manager.airflow.shared_manager import SharedManager
    from resource_manager.airflow.version_compat import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
    )
    from resource_manager.airflow.webapp import manager_of_tasks

from resource_manager import GPUResourceManager
from resource_manager.errors import ResourceManagerError, StoreRefusedError, is_outage
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.client_errors import ServiceError
from resource_manager.storage.outage import outage
from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, context_of


@pytest.mark.parametrize(
    ("host", "kind"), [("memory://", GPUResourceManager), ("http://gpus.example.com", ServiceClient)]
)
def test_a_connection_opens_a_store_or_the_service(monkeypatch, host, kind):
    connection = {"conn_type": "gpu_manager", "host": host, "password": "t", "extra": {"lock_timeout_s": 5}}
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps(connection))
    assert isinstance(GPUManagerHook("gpus").get_conn(), kind)


AIRFLOW_SILENT = AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR))


def test_an_airflow_that_does_not_tell_of_a_connection_is_an_outage(monkeypatch):
    monkeypatch.setattr(GPUManagerHook, "get_connection", Mock(side_effect=AIRFLOW_SILENT))
    with pytest.raises(AirflowException, match=r"^connection 'gpus': Airflow does not answer: ") as caught:
        GPUManagerHook("gpus").get_conn()
    assert is_outage(caught.value)


@pytest.mark.parametrize("error", [outage("new password", StoreRefusedError), ServiceError(401, "new token")])
@pytest.mark.parametrize("asks", ["triggerer", "scheduler"])
def test_a_connection_whose_login_is_refused_is_read_again(monkeypatch, error, asks):
    def refuses():
        raise error

    seen = []
    opened = [Mock(servers=lambda: "answered"), Mock(servers=refuses)]
    monkeypatch.setattr(hook, "open_manager", lambda settings, by: opened.pop())

    def act(manager):
        seen.append(manager.servers())

    async def call_twice():
        for _ in range(2):
            await SharedManager.of("gpu_manager_default").call(act)

    if asks == "triggerer":
        asyncio.run(call_twice())
    else:
        listener._safely(act)
        listener._safely(act)
        listener.finish()
    assert seen == ["answered"] * 2


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("postgresql://ada@db:5432/gpus", "postgresql://ada:p%2Fw@db:5432/gpus"),
        ("postgresql://ada:own@db/gpus", "postgresql://ada:own@db/gpus"),  # pragma: allowlist secret
        ("redis://h:6379/0", "redis://:p%2Fw@h:6379/0"),
        ("airflow://", "airflow://"),
        ("sqlite:////x.db", "sqlite:////x.db"),
    ],
)
def test_the_password_of_a_connection_is_that_of_its_store(monkeypatch, host, url):
    opened = []
    monkeypatch.setattr(hook, "open_manager", lambda settings, by: opened.append(settings.store))
    connection = {"conn_type": "gpu_manager", "host": host, "password": "p/w"}  # pragma: allowlist secret
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps(connection))
    GPUManagerHook("gpus").get_conn()
    assert opened == [url]


def test_a_connection_can_be_tested_from_its_form(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps({"conn_type": "gpu_manager", "host": "memory://"}))
    works, said = GPUManagerHook("gpus").test_connection()
    assert works
    assert said.startswith("4 servers, 32 of 32 GPUs free")
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps({"conn_type": "gpu_manager", "host": "gpus"}))
    works, said = GPUManagerHook("gpus").test_connection()
    assert not works
    assert said.startswith("connection 'gpus': its host must be the URL of a store")


def test_a_closed_server_is_not_free_in_connection_test_and_sensor(manager):
    sensor = GPUAvailableSensor(task_id="s", gpus=8, cpus=64, deferrable=False)
    for server_id in range(1, 4):
        manager.drain(server_id, failed=server_id == 3)
    assert sensor.poke(context_of())
    assert GPUManagerHook().test_connection()[1].startswith("4 servers, 8 of 32 GPUs free, 24 closed")
    manager.drain(0)
    assert not sensor.poke(context_of())


def test_a_wrong_extra_of_a_connection_is_reported_in_one_line(monkeypatch):
    connection = {"conn_type": "gpu_manager", "host": "memory://", "extra": {"policy": "best_fit"}}
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps(connection))
    with pytest.raises(
        AirflowException, match=r"^connection 'gpus': setting 'policy': there is no such setting$"
    ):
        GPUManagerHook("gpus").get_conn()


def test_a_missing_connection_is_reported_in_one_line(monkeypatch):
    with pytest.raises(AirflowException, match="connection 'nope' is not defined; add it"):
        GPUManagerHook("nope").get_conn()
    monkeypatch.setenv("GPU_MANAGER_STORE", "memory://")
    assert isinstance(GPUManagerHook().get_conn(), GPUResourceManager)


def test_a_connection_that_airflow_did_not_tell_of_is_used_once_it_does(monkeypatch):
    """Airflow says that there is none also when its database does not answer, as in a fail-over."""
    monkeypatch.setenv("GPU_MANAGER_STORE", "memory://")
    monkeypatch.setattr(hook, "SETTINGS_FOR_S", 0.0)
    connected = GPUManagerHook()
    of_settings = connected.get_conn()
    assert connected.get_conn() is of_settings, "used at once, and opened once"
    with monkeypatch.context() as silent:
        silent.setattr(GPUManagerHook, "get_connection", Mock(side_effect=AIRFLOW_SILENT))
        assert connected.get_conn() is of_settings
    connection = {"conn_type": "gpu_manager", "host": "memory://", "extra": {"lock_timeout_s": 5}}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    used: Any = connected.get_conn()
    assert used.settings.lock_timeout_s == 5
    monkeypatch.delenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT")
    assert connected.get_conn() is used


def test_the_settings_are_used_for_a_while_without_a_look_for_the_connection(monkeypatch):
    monkeypatch.setenv("GPU_MANAGER_STORE", "memory://")
    looks = Mock(side_effect=AirflowNotFoundException)
    monkeypatch.setattr(GPUManagerHook, "get_connection", looks)
    connected = GPUManagerHook()
    assert connected.get_conn() is connected.get_conn()
    assert looks.call_count == 1


@pytest.mark.parametrize("conn_id", ["gpus", "gpu_manager_default"])
@pytest.mark.parametrize("text", ['{"conn_type": ', "redis://host:port/0"])
def test_a_connection_that_airflow_cannot_read_is_no_missing_one(monkeypatch, conn_id, text):
    """Else the settings would be used, and may name another store."""
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(
        AirflowException, match=f"^connection '{conn_id}': {variable} is neither JSON nor a URL"
    ):
        GPUManagerHook(conn_id).get_conn()


def test_one_gpu_is_granted_if_the_inventory_is_stored(monkeypatch, tmp_path, embedded_redis):
    """One process applies the inventory; the connections have only a URL, of the store or of a service."""
    servers = tmp_path / "servers.toml"
    servers.write_text('[[servers]]\nname = "box"\ngpus = 2\ncpus = 8\n')
    url = embedded_redis.fresh_url()
    command = [sys.executable, "-m", "resource_manager.cli", "--store", url]
    subprocess.run([*command, "apply", "--yes", str(servers)], check=True, timeout=60)
    environment = {**os.environ, "GPU_MANAGER_TOKENS": str(tmp_path / "tokens.json")}
    service = subprocess.Popen(
        [*command, "serve", "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = map(json.loads, present(service.stderr))
        address = next(line["address"] for line in lines if "address" in line)
        for name, host in (("STORE", url), ("SERVICE", address)):
            connection = {"conn_type": "gpu_manager", "host": host}
            monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(connection))
            with closing(GPUManagerHook(name.lower()).get_conn()) as manager:
                status = ask(manager, replace(TASK, task_id=name), 1)
                assert (status["state"], status["server_name"]) == ("RUNNING", "box")
                with pytest.raises(AirflowFailException, match=r"^gpus must be between 1 and 2 \(the"):
                    ask(manager, TASK, 3)
    finally:
        service.terminate()
        service.communicate(timeout=30)


def test_the_console_inside_airflow_uses_the_store_of_the_tasks(monkeypatch):
    monkeypatch.setenv("GPU_MANAGER_STORE", "memory://")
    assert manager_of_tasks().settings.lock_timeout_s == 60
    connection = {"conn_type": "gpu_manager", "host": "memory://", "extra": {"lock_timeout_s": 5}}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    assert manager_of_tasks().settings.lock_timeout_s == 5
    connection = {"conn_type": "gpu_manager", "host": "http://gpus.example.com"}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    with pytest.raises(ResourceManagerError, match=r"at http://gpus\.example\.com: use the console there"):
        manager_of_tasks()
