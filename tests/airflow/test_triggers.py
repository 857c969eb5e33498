"""Triggers that wait for a grant, for free GPUs and for the end of a lease."""

import asyncio
import json
import warnings
from dataclasses import asdict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import triggers
    from resource_manager.airflow.triggers import (
        FreeCapacityTrigger,
        GrantTrigger,
        JobTrigger,
        LeaseEndTrigger,
        TriggerState,
    )

from resource_manager import GPUResourceManager
from resource_manager.core.models import JobPlace
from resource_manager.jobs.running_job import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.servers import default_inventory
from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, fire


def test_the_grant_trigger_fires_after_a_release(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    trigger = GrantTrigger(asdict(TASK))
    event = fire(trigger, lambda: manager.release_resources("holds1"))
    assert event["state"] == TriggerState.GRANTED


def test_the_grant_trigger_fires_after_other_leases_expired(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8, ttl=0.5)
    ask(manager, TASK, 8)
    assert fire(GrantTrigger(asdict(TASK)))["state"] == TriggerState.GRANTED


def test_the_grant_trigger_fires_after_max_wait_and_for_a_lost_request(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    late = fire(GrantTrigger(asdict(TASK), max_wait_s=0.05, before_s=0.2))
    assert late["state"] == TriggerState.MAX_WAIT_EXCEEDED
    assert 0.05 <= late["waited_s"] <= manager.status_of(TASK.lease_id)["waited_s"] - 0.2
    manager.cancel(TASK.lease_id)
    assert fire(GrantTrigger(asdict(TASK)))["state"] == TriggerState.REQUEST_LOST


def test_two_hundred_waiting_tasks_cost_one_connection(monkeypatch, own_redis):
    url, server = own_redis.url, own_redis.client()
    monkeypatch.setenv("GPU_MANAGER_STORE", url)
    manager = GPUResourceManager.from_url(url, inventory=default_inventory())
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
    server.close()
    assert connections == 1
    assert [event["state"] for event in fired] == [TriggerState.GRANTED]


def test_triggers_fire_for_free_gpus_and_for_the_end_of_a_lease(manager, monkeypatch, fast_triggers):
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


def test_triggers_survive_serialization():
    job = RunningJob("k", "d/r/t", 1, JobPlace("ssh", "gpu-a", machine="m")).to_dict()
    for trigger in (
        GrantTrigger(asdict(TASK), "c", 5.0, 1.0),
        FreeCapacityTrigger({"task_id": "x", "gpus": 2, "cpus": 1}),
        LeaseEndTrigger(asdict(TASK), 3),
        JobTrigger(asdict(TASK), [job], 60.0),
    ):
        path, arguments = trigger.serialize()
        assert json.loads(json.dumps(arguments)) == arguments
        assert path == f"resource_manager.airflow.triggers.{type(trigger).__name__}"
        assert type(trigger)(**arguments).serialize() == (path, arguments)
