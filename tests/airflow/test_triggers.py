"""Triggers that wait for a grant, for free GPUs and for the end of a lease."""

import asyncio
import itertools
import json
import threading
import time
import warnings
from typing import Any
from unittest.mock import Mock

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import GPUTrainingOperator
    from resource_manager.airflow.shared_manager import SharedManager
    from resource_manager.airflow.task_trigger.base import LAUNCHER_THREADS
    from resource_manager.airflow.task_trigger.events import GrantState
    from resource_manager.airflow.task_trigger.waits import (
        FreeCapacityTrigger,
        GrantTrigger,
        GrantWait,
        LeaseEndTrigger,
    )

from resource_manager import GPUResourceManager
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import LauncherUnreachableError
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.servers import default_inventory
from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, again, asked, fire


def test_the_grant_trigger_fires_after_a_release(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    trigger = GrantTrigger(TASK)
    event = fire(trigger, lambda: manager.release_resources("holds1"))
    assert event["state"] == GrantState.GRANTED
    lease = manager.status_of(TASK.lease_id)
    assert lease["expires_at"] - time.time() == pytest.approx(600, abs=60), "until a worker goes on"


def test_the_grant_trigger_fires_after_other_leases_expired(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8, ttl=0.5)
    ask(manager, TASK, 8)
    assert fire(GrantTrigger(TASK))["state"] == GrantState.GRANTED


def test_the_grant_trigger_fires_after_max_wait_and_for_a_lost_request(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    assert fire(GrantTrigger(TASK, max_wait_s=0.05))["state"] == GrantState.MAX_WAIT_EXCEEDED
    manager.cancel(TASK.lease_id)
    assert fire(GrantTrigger(TASK))["state"] == GrantState.REQUEST_LOST


def test_two_hundred_waiting_tasks_cost_three_connections(monkeypatch, pause, own_redis):
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
        watchers = [asyncio.ensure_future(anext(GrantTrigger(task).run())) for task in tasks]
        while len(server.client_list()) == before:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.5)
        connections = len(server.client_list()) - before
        manager.release_resources("holds0")
        done, _ = await asyncio.wait(watchers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for watcher in watchers:
            watcher.cancel()
        return connections, [watcher.result().payload for watcher in done]

    pause({"airflow.task_trigger.base.MIN_DEFERRAL_S": 0.0})
    connections, fired = asyncio.run(wait())
    manager.close()
    server.close()
    assert connections <= 3, "one that waits for changes, one for reasons of waits, one for all else"
    assert [event["state"] for event in fired] == [GrantState.GRANTED]


def test_a_triggerer_that_takes_over_many_tasks_reads_their_requests_together(
    manager, connect, monkeypatch, notes, wanted, fast_triggers
):
    """One by one, the jobs of the first would begin only once all were asked for."""
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="true")
    triggers = [asked(operator, map_index=index) for index in range(20)]
    reads: list[Any] = []
    waits: list[Any] = []

    def until_over(wait):
        waits.append(wait)
        return asyncio.sleep(60)

    connect(
        Mock(
            wraps=manager,
            status_of=reads.append,
            lease_changes=counted(manager.lease_changes, reads),
        )
    )
    monkeypatch.setattr(GrantWait, "until_over", until_over)

    async def take_over():
        running = [asyncio.ensure_future(anext(trigger.run())) for trigger in triggers]
        while len(waits) < len(triggers):
            await asyncio.sleep(0.01)
        for each in running:
            each.cancel()

    asyncio.run(asyncio.wait_for(take_over(), 30))
    assert len(reads) < 5


def test_an_error_that_nobody_foresaw_fails_a_wait_and_does_not_make_it_endless(
    manager, connect, fast_triggers
):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)

    def breaks(after, wait_s=0.0, prefix=""):
        if wait_s:
            raise TypeError("a bug")
        return manager.lease_changes(after, wait_s, prefix)

    connect(Mock(wraps=manager, lease_changes=breaks))
    with pytest.raises(TypeError, match="a bug"):
        fire(GrantTrigger(TASK))


def counted(function, calls):
    """Return the function, which notes its calls."""
    return lambda *given, **more: calls.append(given) or function(*given, **more)


def test_triggers_fire_for_free_gpus_and_for_the_end_of_a_lease(manager, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    room = FreeCapacityTrigger({"task_id": "x", "gpus": 8, "cpus": 8}, poke_interval_s=0.01)
    assert fire(room, lambda: manager.release_resources("holds2")) == {
        "server_name": "gpu-server-2",
        "reasons": ["no server with 8 GPUs: none is free anywhere"],
    }
    lease = ask(manager, TASK, 8)
    over = LeaseEndTrigger(TASK, lease["fencing_token"])
    assert fire(over, lambda: manager.release_resources(TASK.lease_id)) == {}


def test_what_a_sensor_asks_holds_up_no_call_of_others(manager, connect):
    """A hundred of them ask for minutes, in which no lease would be renewed."""
    asks, answers = threading.Event(), threading.Event()

    def explain(**arguments):
        asks.set()
        assert answers.wait(30)
        return manager.explain(**arguments)

    connect(Mock(wraps=manager, explain=explain))

    async def run():
        sensor = FreeCapacityTrigger({"task_id": "x", "gpus": 8, "cpus": 8})
        firing = asyncio.ensure_future(anext(sensor.run()))
        assert await asyncio.to_thread(asks.wait, 30)
        call = SharedManager.of("gpu_manager_default").call(lambda manager: manager.queue())
        try:
            queue = await asyncio.wait_for(call, 5.0)
        finally:
            answers.set()
        return queue, (await firing).payload["server_name"]

    assert asyncio.run(run()) == ([], "gpu-server-0")


def test_leases_whose_servers_are_silent_hold_up_no_start_while_their_end_is_waited_for(
    manager, fast_triggers, launch_by
):
    lease = ask(manager, TASK, 8)
    there = JobPlace("local", machine="gpu-a/1", folder="/jobs", mark="f00d", user="ada")
    manager.place_job(TASK.lease_id, [there], fencing_token=lease["fencing_token"])
    looks, all_look, answers = itertools.count(1), threading.Event(), threading.Event()

    class Silent(LocalLauncher):
        def status(self, key):
            if next(looks) == LAUNCHER_THREADS:
                all_look.set()
            answers.wait(10.0)
            raise LauncherUnreachableError("no answer")

    launch_by(lambda place: Silent())

    async def run():
        waits = [LeaseEndTrigger(TASK, lease["fencing_token"]) for _ in range(LAUNCHER_THREADS)]
        firing = [asyncio.ensure_future(anext(each.run())) for each in waits]
        while not all_look.is_set():
            await asyncio.sleep(0.02)
        try:
            await asyncio.wait_for(GrantTrigger(TASK).begin_launcher(lambda: None), 5.0)
        finally:
            answers.set()
        for each in firing:
            each.cancel()
        await asyncio.wait(firing)

    asyncio.run(run())


def test_triggers_survive_serialization(manager):
    train = GPUTrainingOperator(
        task_id="t", gpus=2, command="train", container={"ulimits": [{"Name": "core"}]}
    )
    for trigger in (
        GrantTrigger(TASK, 5.0, gpu_conn_id="c"),
        FreeCapacityTrigger({"task_id": "x", "gpus": 2, "cpus": 1}),
        LeaseEndTrigger(TASK, 3),
        asked(train),
    ):
        _, arguments = trigger.serialize()
        assert json.loads(json.dumps(arguments)) == arguments
        assert again(trigger).serialize() == trigger.serialize()


def test_a_trigger_does_not_name_its_arguments_in_a_log(manager):
    train = GPUTrainingOperator(task_id="t", gpus=2, command="train", env={"TOKEN": "of someone"})
    assert repr(asked(train)) == f"<TaskTrigger of {TASK.lease_id}>"


@pytest.mark.parametrize("turns", range(4))
def test_a_trigger_that_is_cancelled_as_something_changes_is_cancelled(turns):
    async def run():
        changed = asyncio.Event()
        waiting = asyncio.ensure_future(SharedManager.until_set(changed, 30))
        await asyncio.sleep(0.01)
        changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(run())


def test_a_grant_is_seen_in_the_store_of_a_connection_that_comes_later(manager, connect, fast_triggers):
    """Its version may be beyond that of the store of the settings, as if only the rest had changed there."""
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    with GPUResourceManager.from_url("memory://", inventory=default_inventory()) as other:
        ask(other, TASK, 8)
        for number in range(12):
            other.submit(f"holds{number}", 2, 1)
        trigger = GrantTrigger(TASK)
        assert fire(trigger, lambda: connect(other))["state"] == GrantState.GRANTED


def test_a_grant_does_not_wait_until_a_long_queue_is_read(manager, connect, fast_triggers):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    is_read, goes_on = threading.Event(), threading.Event()

    def long_queue(**_):
        is_read.set()
        assert goes_on.wait(30)
        return []

    connect(Mock(wraps=manager, queue=long_queue))

    def free():
        assert is_read.wait(30)
        manager.release_resources("holds0")

    try:
        assert fire(GrantTrigger(TASK), free)["state"] == GrantState.GRANTED
    finally:
        goes_on.set()
