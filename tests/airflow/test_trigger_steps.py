"""A triggerer is killed before or after any step of a task, or halted there while another one goes on.

Either way its job runs once, its GPUs are released once, and the same event fires.
"""

import asyncio
import threading
import warnings
from contextlib import suppress

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import GPUTrainingOperator
    from resource_manager.airflow.task_trigger import trigger as task_trigger
    from resource_manager.airflow.task_trigger.events import EndState
    from resource_manager.airflow.task_trigger.job_watch import JobWatch
    from resource_manager.airflow.task_trigger.task_lease import TaskLease
    from resource_manager.airflow.task_trigger.trigger import TaskTrigger
    from resource_manager.airflow.task_trigger.waits import GrantWait

from resource_manager.jobs import reconcile
from resource_manager.jobs.gang_job import GangJob
from tests.airflow.tasks import TASK, again, asked, fire, interrupted

pytestmark = pytest.mark.usefixtures("wanted", "notes", "fast_triggers")

STEPS = {
    "asked, not granted": (GrantWait, "until_over", "before"),
    "granted, not prepared": (GangJob, "prepare", "before"),
    "prepared, not placed": (TaskLease, "place", "before"),
    "placed, not started": (GangJob, "start", "before"),
    "started, not noted": (GangJob, "start", "after"),
    "started, not looked at": (JobWatch, "until_over", "before"),
    "ended, end not kept": (task_trigger, "keep_end", "before"),
    "end kept, stopper not awaited": (TaskLease, "wait_for_stopper", "before"),
    "end kept, not released": (TaskLease, "release", "before"),
    "released, not fired": (TaskTrigger, "_fire", "before"),
}

each_step = pytest.mark.parametrize(("place", "name", "when"), STEPS.values(), ids=STEPS)


class KilledError(BaseException):
    """The process is gone: nothing of it catches this."""


@pytest.fixture
def task(manager, monkeypatch, pause, tmp_path):
    """Trigger of a task whose request waits for GPUs, and a function that frees them."""
    pause({"airflow.task_trigger.task_lease.STOPPER_S": 0.1})
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    command = f"echo run >> {tmp_path}/runs; echo over; exit 143"
    trigger = asked(GPUTrainingOperator(task_id="t", gpus=2, command=command))
    yield trigger, lambda: manager.release_resources("holds0")
    entry = manager.status_of(TASK.lease_id)
    if entry is not None:
        reconcile.end(manager, entry)


def check(manager, events, tmp_path):
    for event in events:
        assert (event["state"], event["exit_code"], event["last_line"]) == (EndState.JOB_ENDED, 143, "over")
    assert (tmp_path / "runs").read_text() == "run\n"
    ours = [change for change in manager.history() if change.get("lease_id") == TASK.lease_id]
    assert [change["outcome"] for change in ours if change["change"] == "released"] == ["FAILED"]
    assert manager.status_of(TASK.lease_id) is None


@each_step
def test_a_triggerer_that_is_killed_is_followed_by_one_that_fires_the_same_event(
    manager, task, monkeypatch, tmp_path, place, name, when
):
    trigger, free = task

    def die():
        raise KilledError

    async def dies():
        die()

    if name != "until_over" or place is not GrantWait:
        free()
    with monkeypatch.context() as patched:
        interrupted(patched, place, name, when, die, dies)
        with pytest.raises(KilledError):
            asyncio.run(asyncio.wait_for(anext(trigger.run()), 30))
    with suppress(Exception):
        free()
    check(manager, [fire(again(trigger))], tmp_path)


@each_step
def test_a_triggerer_that_is_halted_fires_the_event_of_the_one_that_went_on(
    manager, task, monkeypatch, tmp_path, place, name, when
):
    trigger, free = task
    halted, goes_on = threading.Event(), threading.Event()

    def halt():
        halted.set()
        assert goes_on.wait(30)

    async def both():
        running = asyncio.create_task(anext(trigger.run()))
        assert await asyncio.to_thread(halted.wait, 30)
        free()
        other = again(trigger)
        second = await asyncio.wait_for(anext(other.run()), 30)
        goes_on.set()
        first = await asyncio.wait_for(running, 30)
        for each in (trigger, other):
            await each.cleanup()
        return [first.payload, second.payload]

    if name != "until_over" or place is not GrantWait:
        free()
    interrupted(monkeypatch, place, name, when, halt, lambda: asyncio.to_thread(halt))
    check(manager, asyncio.run(both()), tmp_path)
