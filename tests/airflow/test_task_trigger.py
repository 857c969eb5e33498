"""Trigger of a training: its job's log, renewals, limits and ends, and what a second trigger finds."""

import asyncio
import logging
import pickle
import re
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock

import pytest

from tests.builders import present

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import GPUTrainingOperator, task_results
    from resource_manager.airflow.task_trigger import trigger as trigger_steps
    from resource_manager.airflow.task_trigger.events import EndState, TaskEnd, storable
    from resource_manager.airflow.task_trigger.notes import TaskNotes
    from resource_manager.airflow.task_trigger.task_lease import TaskLease
    from resource_manager.airflow.use_meter import UseMeter, usage_line
    from resource_manager.airflow.version_compat import AirflowException

from resource_manager.core.changes import GpuClosed
from resource_manager.core.maintenance import as_text as utc
from resource_manager.core.models import Gpu, Node
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import StoreUnavailableError
from resource_manager.jobs import reconcile
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.job_preemption import queue_again
from resource_manager.jobs.launchers import JobState, LauncherUnreachableError, NoAnswerError
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.maintenance_windows import WindowForm
from tests.agent.reporting import server
from tests.airflow.asking import report_of
from tests.airflow.tasks import TASK, again, asked, context_of, fire, interrupted, until
from tests.builders import redefine
from tests.eventually import wait_for

pytestmark = pytest.mark.usefixtures("wanted")


@pytest.fixture
def asks(manager, notes, monkeypatch, tmp_path, fast_triggers):
    """Return a function that returns the trigger of a task which runs a command on this machine."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))

    def ask(command, timeout_s=None, stale_grace_s=60.0, unreachable_s=600.0, **more):
        operator = GPUTrainingOperator(
            task_id="t",
            gpus=2,
            command=command,
            execution_timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            unreachable_timeout=timedelta(seconds=unreachable_s),
            stale_grace_s=stale_grace_s,
            **more,
        )
        return asked(operator)

    yield ask
    entry = manager.status_of(TASK.lease_id)
    if entry is not None:
        reconcile.end(manager, entry)


def state_of(job_key):
    with closing(LocalLauncher()) as launcher:
        return launcher.status(job_key).state


def job_keys(notes):
    """Return the keys of the jobs that triggers watched."""
    return [notes["job_log_place"]["job"]]


def outcomes(manager):
    return [change.get("outcome", "") for change in manager.history() if change["change"] == "released"]


def is_logged(line, output):
    """Return True if the line is in the log, in the form of Airflow 3.0 or that of later ones."""
    return re.search(rf"(\[info +\]|INFO -) {line}\b", output) is not None


def test_a_job_is_started_watched_and_ended_and_its_gpus_are_free_before_the_event(asks, manager, notes):
    event = fire(asks("echo one; echo two; echo; exit 4"))
    assert event == {"state": EndState.JOB_ENDED, "exit_code": 4, "last_line": "two"}
    assert manager.leases() == manager.queue() == []
    assert outcomes(manager) == ["FAILED"]
    assert [state_of(key) for key in job_keys(notes)] == [JobState.ABSENT]
    [place] = notes["allocation"]["job_places"]
    assert place["launcher"] == "local"


def test_a_task_waits_for_its_gpus_and_then_runs(asks, manager):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    trigger = asks("echo over")
    assert manager.queue()[0]["task_id"] == TASK.lease_id
    event = fire(trigger, lambda: manager.release_resources("holds1"))
    assert (event["exit_code"], event["last_line"]) == (0, "over")
    assert event["reasons"] == ["no server with 2 GPUs: none is free anywhere"]
    assert "SUCCESS" in outcomes(manager)


def test_a_request_that_was_lost_is_made_again_while_the_task_is_wanted(asks, manager, wanted):
    trigger = asks("echo over")
    manager.reset()
    wanted(False)
    assert fire(again(trigger)) == {"state": EndState.FAILED, "detail": "the task was ended"}
    assert manager.queue() == []
    wanted(True)
    assert fire(trigger)["last_line"] == "over"


def test_a_request_that_somebody_cancelled_ends_its_try_before_and_while_it_is_waited_for(asks, manager):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    trigger = asks("echo over")
    event = fire(trigger, lambda: manager.cancel(TASK.lease_id, reason="not today"))
    words = f"{manager.history()[-1]['by']} cancelled its request: not today"
    assert event["detail"] == words
    assert fire(again(trigger))["detail"] == words
    assert manager.queue() == []


def test_a_lease_that_somebody_released_before_its_job_began_ends_its_try(asks, manager):
    trigger = asks("echo over")
    manager.release(TASK.lease_id, outcome="CANCELLED")
    assert fire(trigger)["detail"] == f"{manager.history()[-1]['by']} released its lease"
    assert manager.leases() == []


@pytest.mark.parametrize("released_after_s", [0.0, 0.5])
def test_a_job_that_somebody_stopped_before_it_began_ends_its_try(
    asks, manager, monkeypatch, released_after_s
):
    """Who stops a job releases its lease a moment later, as the trigger learns that nothing may start."""

    def stop():
        present(GangJob.of(manager.leases()[0])).stop()
        given = {"outcome": "CANCELLED", "job_end": "ended", "reason": "not today"}
        threading.Timer(released_after_s, manager.release, [TASK.lease_id], given).start()

    interrupted(monkeypatch, GangJob, "start", "before", stop, None)
    event = fire(asks("echo over"))
    assert event["detail"] == f"{manager.history()[-1]['by']} released its lease: not today"
    assert manager.leases() == []


def test_a_job_that_was_stopped_before_it_began_begins_under_a_new_lease_if_nobody_ended_its_own(
    asks, manager, monkeypatch, pause
):

    def stop():
        present(GangJob.of(manager.leases()[0])).stop()

    pause({"airflow.task_trigger.task_lease.STOPPER_S": 0.1})
    interrupted(monkeypatch, GangJob, "start", "before", stop, None)
    assert fire(asks("echo over"))["last_line"] == "over"
    assert outcomes(manager) == ["CANCELLED", "SUCCESS"]


def test_a_wait_beyond_its_limit_leaves_the_queue(asks, manager):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    event = fire(asks("true", max_wait=timedelta(seconds=0.05)))
    assert event["state"] == EndState.MAX_WAIT_EXCEEDED
    assert manager.queue() == []


def test_a_wait_that_ends_before_the_trigger_looks_counts(asks, manager):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    trigger = asks("echo over")
    manager.release_resources("holds1")
    lease = manager.status_of(TASK.lease_id)
    event = asyncio.run(anext(trigger.run())).payload
    assert event["waited_s"] == lease["granted_at"] - lease["queued_at"] > 0.0


# ---- a second trigger of the same task ----


def test_the_next_triggerer_goes_on_with_the_job_that_runs(asks, manager, notes, tmp_path):
    goes_on = tmp_path / "goes-on"
    trigger = asks(f"echo begins >> {tmp_path}/runs; until [ -e {goes_on} ]; do sleep 0.05; done; echo over")
    until(trigger, lambda: (tmp_path / "runs").exists() and "job_log_place" in notes)
    assert len(manager.leases()) == 1
    goes_on.touch()
    assert fire(again(trigger))["last_line"] == "over"
    assert (tmp_path / "runs").read_text() == "begins\n"


@pytest.mark.parametrize("step", ["release", "fire"])
def test_an_end_that_is_known_fires_again_and_runs_nothing_again(
    asks, manager, notes, variables, tmp_path, monkeypatch, step
):
    """As after a triggerer was killed between the end of the job and its release, or the event, or a worker
    before it has collected: then in the next try, which has no XComs of this one."""
    trigger = asks(f"echo run >> {tmp_path}/runs; echo over; exit 3")
    if step == "fire":
        fire(trigger)
    else:

        def unreachable(*_, **__):
            raise StoreUnavailableError("no answer")

        with monkeypatch.context() as killed:
            killed.setattr(manager, "release", unreachable)
            until(trigger, lambda: variables)
        assert len(manager.leases()) == 1
    notes.clear()
    event = fire(again(trigger))
    assert (event["state"], event["exit_code"], event["last_line"]) == (EndState.JOB_ENDED, 3, "over")
    assert (tmp_path / "runs").read_text() == "run\n"
    assert manager.leases() == []
    assert outcomes(manager) == ["FAILED"]


def test_two_triggers_of_one_task_run_its_job_once_and_fire_the_same_event(asks, manager, notes, tmp_path):
    trigger = again(asks(f"echo run >> {tmp_path}/runs; sleep 0.5; echo over; exit 3"), ttl_s=0.5)

    async def both():
        runs = [anext(each.run()) for each in (trigger, again(trigger))]
        return [event.payload for event in await asyncio.gather(*runs)]

    first, second = asyncio.run(asyncio.wait_for(both(), 30))
    assert (first["exit_code"], first["last_line"]) == (3, "over")
    assert {**first, "waited_s": 0} == {**second, "waited_s": 0}
    assert (tmp_path / "runs").read_text() == "run\n"
    assert manager.leases() == []


def test_a_triggerer_that_was_stopped_takes_no_server_for_silent(asks, pause, launch_by):
    """While it was stopped it heard nothing of the look that it had begun."""
    pause({"airflow.task_trigger.job_watch.MAX_STEP_S": 0.1, "airflow.task_trigger.job_watch.LOOK_S": 0.01})
    was_stopped = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    class Slow(LocalLauncher):
        def logs(self, key, offset=0):
            if not was_stopped.is_set():
                asyncio.run_coroutine_threadsafe(stopped(), loops[0])
                time.sleep(1.0)
            return super().logs(key, offset)

    async def stopped():
        was_stopped.set()
        time.sleep(0.8)

    launch_by(lambda place: Slow(place=replace(place, address="")), "local")
    trigger = asks("echo over", unreachable_s=0.5)

    async def run():
        loops.append(asyncio.get_running_loop())
        return (await anext(trigger.run())).payload

    assert asyncio.run(asyncio.wait_for(run(), 30))["state"] == EndState.JOB_ENDED


def test_an_end_of_an_earlier_lease_leaves_the_newest_one_alone(asks, manager):
    """As of a trigger that wakes late: its task has another lease by now."""
    asks("true")
    manager.release(TASK.lease_id)
    trigger = asks("true")
    [newest] = manager.leases()
    end = TaskEnd(state="job_ended", exit_code=0, fencing_token=newest["fencing_token"] - 1)
    task_results.keep_end(TASK, end)
    assert fire(trigger)["exit_code"] == 0
    assert manager.leases() == [newest]


# ---- what it does while the job runs ----


def test_a_look_at_a_job_asks_its_server_once_and_so_do_start_and_end(asks, launch_by):
    """Each question is a command by ssh: the output comes with the status."""
    asked = []

    class Asked(LocalLauncher):
        def __getattribute__(self, name):
            if name in ("prepare", "start", "status", "logs", "terminate", "stop"):
                asked.append(name)
            return super().__getattribute__(name)

    launch_by(lambda place: Asked(place=place), "local")
    assert fire(asks("sleep 0.3; exit 3"))["exit_code"] == 3
    looks = asked.count("logs")
    assert asked == ["prepare", "start", *["logs"] * looks, "stop"]
    assert looks > 1


def test_the_job_trigger_renews_while_the_job_runs(asks, manager):
    assert fire(again(asks("sleep 1.5"), ttl_s=0.2))["exit_code"] == 0
    assert len(manager.history(what="renew")) >= 2
    assert {change["by"] for change in manager.history(what="renew")} == {"airflow:test/d/t"}


def test_a_lease_that_nobody_renewed_for_long_is_renewed_at_once(asks, manager, pause):
    """Airflow may be slow to bring the task from its worker here: a third of the lease's life is over."""
    pause({"airflow.shared_manager.RENEW_TOGETHER_S": 0.01})
    trigger = asks("sleep 60")
    life_s = trigger.plan["ttl_s"]
    until(again(trigger, ttl_s=4 * life_s), lambda: manager.history(what="renew"))


def test_a_long_lease_is_renewed_in_each_recovery_window(asks, manager, pause):
    pause({"airflow.shared_manager.RENEW_TOGETHER_S": 0.01, "airflow.task_trigger.base.RENEW_EVERY_S": 0.05})
    until(again(asks("sleep 60"), ttl_s=3600.0), lambda: len(manager.history(what="renew")) > 2)


@pytest.fixture
def read_always(pause):
    """Triggers that read the use of the GPUs again each time."""
    pause({"airflow.shared_manager.USE_EVERY_S": 0.0})


@pytest.fixture
def measured(read_always, monkeypatch):
    """What meters of use were told, in order."""
    told, add = [], UseMeter.add

    def added(meter, gpus):
        add(meter, gpus)
        told.append(gpus)

    monkeypatch.setattr(UseMeter, "add", added)
    return told


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_the_use_of_the_gpus_is_measured_while_the_job_runs(asks, manager, measured, tmp_path):
    report_of(manager, utilization_percent=71, memory_used_mib=63488)
    job = asks(f"until [ -e {tmp_path / 'measured'} ]; do sleep 0.05; done; echo over")

    def end():
        wait_for(lambda: measured)
        (tmp_path / "measured").touch()

    event = fire(job, end)
    assert (event["state"], event["last_line"]) == (EndState.JOB_ENDED, "over")
    usage = event["gpu_usage"]
    assert usage.pop("samples") >= 2
    assert usage == {"mean_utilization_percent": 71.0, "peak_memory_mib": 63488, "memory_mib": 81920}
    line = "GPU use while this job ran: mean 71 %, peak memory 62 of 80 GB"
    assert usage_line(usage) == line


def test_the_use_of_gpus_takes_no_more_memory_after_a_long_training():
    """A triggerer has a thousand of them, and each a sample of each GPU every ten seconds."""

    def gpu(percent):
        return {"utilization_percent": percent, "memory_used_mib": 63488, "memory_mib": 81920}

    meter = UseMeter()
    for percent in (70, 75, 80):
        meter.add([gpu(percent)] * 5000)
    usage = present(meter.summary())
    assert (usage["samples"], usage["mean_utilization_percent"]) == (15000, 75.0)
    assert len(pickle.dumps(meter)) < 1000


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_a_task_whose_gpus_compute_nothing_for_too_long_is_told_so_once(
    asks, manager, measured, capsys, tmp_path
):
    job = asks(f"until [ -e {tmp_path / 'measured'} ]; do sleep 0.05; done", idle_after=1e-6)
    report_of(manager, utilization_percent=0)

    def end():
        wait_for(lambda: len(measured) > 2)
        (tmp_path / "measured").touch()

    fire(job, end)
    assert capsys.readouterr().out.count("its GPUs have computed nothing for") == 1


def test_a_job_that_runs_on_under_maintenance_is_told_so_once(
    asks, manager, connect, pause, capsys, tmp_path
):
    pause({"airflow.shared_manager.WINDOWS_EVERY_S": 0.0})
    seen = []

    def counted():
        windows = manager.maintenance()
        seen.extend(windows)  # which may have been read many times before there was one
        if len(seen) > 9:
            (tmp_path / "seen").touch()
        return windows

    connect(Mock(wraps=manager, maintenance=counted))
    job = asks(f"until [ -e {tmp_path / 'seen'} ]; do sleep 0.05; done")

    def maintain():
        wait_for(lambda: manager.leases()[0]["job_places"])
        begin = manager.store.now() - 60.0
        server = manager.leases()[0]["server_name"]
        window = {"from": utc(begin), "until": utc(begin + 3600.0), "reason": "new fans"}
        manager.add_maintenance(WindowForm.of(**window, servers=[server]))

    fire(job, maintain)
    output = capsys.readouterr().out
    assert output.count("its servers are under maintenance") == 1
    assert "new fans" in output


@pytest.mark.usefixtures("read_always")
def test_without_reports_nothing_is_said_of_the_use(asks):
    assert "gpu_usage" not in fire(asks("sleep 0.3"))


def test_the_next_triggerer_continues_the_log(asks, notes, tmp_path, capsys):
    goes_on = tmp_path / "goes-on"
    first = again(asks(f"echo one; until [ -e {goes_on} ]; do sleep 0.05; done; echo two"), ttl_s=0.05)
    until(first, lambda: notes.get("job_log_place", {}).get("offset"))
    goes_on.touch()
    assert is_logged("one", capsys.readouterr().out)
    assert fire(again(first))["last_line"] == "two"
    said = capsys.readouterr().out
    assert is_logged("two", said)
    assert not is_logged("one", said)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("printf '{\"a\": '; sleep 0.3; printf '1}\\n'", '{"a": 1}'),
        ("printf 1; sleep 0.3; printf 2", "12"),
        ("printf '\\r 50 %%'; sleep 0.3; printf '\\r100 %%'", "100 %"),
    ],
)
def test_a_line_written_in_pieces_is_logged_as_one(asks, command, line):
    assert fire(asks(command))["last_line"] == line


def test_what_a_database_may_refuse_to_store_is_replaced_in_event_and_notes(asks, notes):
    """PostgreSQL has no NUL: a triggerer ended by such an event, and so did the next that took the task."""
    assert fire(asks("printf 'saved a.bin\\0\\n'; exit 3"))["last_line"] == "saved a.bin\ufffd"
    asyncio.run(TaskNotes(TASK, None).keep_log_place("a job", 4, "a.bin\0"))
    assert notes["job_log_place"]["last_line"] == "a.bin\ufffd"
    assert storable({"a\0": [{"b": "\ud800c"}, 1, None]}) == {"a\ufffd": [{"b": "\ufffdc"}, 1, None]}


def test_a_job_that_prints_faster_than_it_is_read_is_renewed_and_times_out(asks, manager):
    trigger = again(asks(f"while :; do echo {'y' * 100}; done", timeout_s=3.0), ttl_s=0.3)
    assert fire(trigger) == {"state": EndState.TIMED_OUT}
    assert len(manager.history(what="renew")) >= 2


def test_long_output_does_not_block_other_triggers(asks, said_by):
    trigger = asks("seq 1000")
    turns, turns_at_line = 0, {}

    def note(line):
        turns_at_line[line] = turns

    said_by(trigger, note=note)

    async def run():
        nonlocal turns
        watching = asyncio.ensure_future(anext(trigger.run()))
        while not watching.done():
            turns += 1
            await asyncio.sleep(0)
        return await watching

    assert asyncio.run(asyncio.wait_for(run(), 20)).payload["last_line"] == "1000"
    assert all(turns_at_line[str(number)] < turns_at_line[str(number + 1)] for number in range(1, 1000))


def test_a_restart_of_the_triggerer_does_not_restart_the_timeout(asks, notes):
    trigger = asks("sleep 60", timeout_s=900.0)
    until(trigger, lambda: "started_at" in notes.get("gpu_task", {}))
    assert notes["gpu_task"]["started_at"] == pytest.approx(time.time(), abs=5)
    notes["gpu_task"]["started_at"] -= 1000.0
    assert fire(again(trigger)) == {"state": EndState.TIMED_OUT}


@pytest.mark.parametrize(("place", "name"), [(trigger_steps, "keep_end"), (TaskLease, "release")])
def test_the_end_of_a_job_that_somebody_stopped_names_them(asks, manager, monkeypatch, place, name):
    def stop():
        with asked_by("ada"):
            manager.release(TASK.lease_id, job_end="gone", reason="stopped")

    interrupted(monkeypatch, place, name, "before", stop, lambda: asyncio.to_thread(stop))
    event = fire(asks("exit 143"))
    assert event["detail"] == "ada released its lease: stopped"
    failed = GPUTrainingOperator(task_id="t", gpus=1, command="exit 143")
    with pytest.raises(AirflowException, match="the job was stopped: ada released its lease: stopped"):
        failed.execute_ended(context_of(), event)


def test_an_end_that_a_trigger_sees_after_a_user_ended_the_task_is_not_kept(
    asks, manager, monkeypatch, variables, wanted
):
    """The listener has dropped what was kept by then, and no try comes that would."""

    def end():
        manager.release(TASK.lease_id, job_end="gone", reason="stopped")
        wanted(False)

    interrupted(monkeypatch, trigger_steps, "keep_end", "before", end, lambda: asyncio.to_thread(end))
    fire(asks("exit 143"))
    assert variables == {}


def test_who_stopped_a_job_is_named_though_the_trigger_sees_its_end_first(asks, manager, notes):
    def stop():
        wait_for(lambda: "job_log_place" in notes and state_of(*job_keys(notes)) is JobState.RUNNING)
        with asked_by("ada"):
            present(GangJob.of(manager.leases()[0])).stop()
            time.sleep(0.3)
            manager.release(TASK.lease_id, job_end="ended", reason="it was the wrong one")

    event = fire(asks("sleep 60"), stop)
    assert event["detail"] == "ada released its lease: it was the wrong one"


@pytest.mark.parametrize("job_end", ["gone", "forced"])
def test_a_job_whose_lease_was_ended_by_another_client_is_stopped(asks, manager, notes, job_end):
    trigger = again(asks("sleep 60"), ttl_s=0.1)

    def release():
        wait_for(lambda: manager.leases()[0]["job_places"])
        manager.release(TASK.lease_id, job_end=job_end, reason="by mistake")

    event = fire(trigger, release)
    who = {"detail": f"{manager.history()[-1]['by']} released its lease: by mistake"}
    assert event == {"state": EndState.LEASE_LOST, **(who if job_end == "gone" else {})}
    assert [state_of(key) for key in job_keys(notes)] == [JobState.ABSENT]
    assert manager.leases() == []


def test_a_job_whose_gpu_failed_is_stopped_with_that_reason(asks, manager, notes):
    trigger = asks("sleep 600", stale_grace_s=0.2)
    lease = manager.status_of(TASK.lease_id)
    node, gpu_id = lease["server_name"], lease["gpu_ids"][0]

    def fails():
        wait_for(lambda: manager.leases()[0]["job_places"])
        manager.commit(lambda cluster, now: [GpuClosed(node, gpu_id, "", "xid 48; double bit ECC", now)])
        assert manager.status_of(TASK.lease_id)["gpu_failed"] == "", "its holder goes on"
        manager.commit(lambda cluster, now: [GpuClosed(node, gpu_id, "", "xid 79; lost", now, stop=True)])

    assert fire(trigger, fails) == {"state": EndState.GPU_FAILED, "detail": "xid 79; lost"}
    assert [state_of(key) for key in job_keys(notes)] == [JobState.ABSENT]
    assert manager.leases() == []


def test_a_job_over_its_time_is_stopped(asks, manager):
    assert fire(asks("sleep 60", timeout_s=0.05)) == {"state": EndState.TIMED_OUT}
    assert manager.leases() == []


def test_a_job_out_of_reach_keeps_its_gpus(asks, manager, monkeypatch):
    trigger = asks("sleep 60", unreachable_s=0.05)
    until(trigger, lambda: manager.leases()[0]["job_places"])
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("resource_manager.jobs.directories.job_files.machine", lambda: "another")
        event = fire(again(trigger))
    assert event["state"] == EndState.JOB_UNREACHABLE
    assert event["detail"].endswith("its GPUs stay allocated until the job is known to be gone")
    assert len(manager.leases()) == 1


@pytest.mark.parametrize("unreachable_s", [600.0, 0.0])
def test_a_start_waits_for_a_server_on_which_the_job_may_run(asks, manager, launch_by, unreachable_s):
    answers = iter([NoAnswerError("no route")] * 3)

    class Late(LocalLauncher):
        def start(self, job):
            for error in answers:
                raise error
            return super().start(job)

    launch_by(lambda place: Late(place=replace(place, address="")), "local")
    event = fire(asks("echo over", unreachable_s=unreachable_s))
    if unreachable_s:
        assert event["last_line"] == "over"
    else:
        assert event["state"] == EndState.JOB_UNREACHABLE
        assert len(manager.leases()) == 1


def test_a_job_whose_output_does_not_come_is_not_out_of_reach(asks, launch_by, tmp_path):
    it_comes, is_over = tmp_path / "comes", tmp_path / "over"

    class Mute(LocalLauncher):
        def logs(self, key, offset=0):
            if not it_comes.exists():
                raise LauncherUnreachableError("no output was sent")
            return super().logs(key, offset)

    def come():
        wait_for(is_over.exists)
        it_comes.touch()

    launch_by(lambda place: Mute(place=replace(place, address="")), "local")
    waits = f"while [ ! -e {it_comes} ]; do sleep 0.01; done"
    event = fire(asks(f"sleep 0.6; touch {is_over}; {waits}; echo it", unreachable_s=0.3), come)
    assert (event["state"], event.get("last_line")) == (EndState.JOB_ENDED, "it")


def test_a_server_that_gives_no_answer_is_asked_once_a_look(asks, launch_by):
    """Each question takes the server's timeout, for which a thread of all triggers waits."""
    questions = []

    class Silent(LocalLauncher):
        def ask(self, act, **arguments):
            if act in ("logs", "status"):
                questions.append(act)
                raise NoAnswerError("no route")
            return super().ask(act, **arguments)

    launch_by(lambda place: Silent(place=replace(place, address="")), "local")
    assert fire(asks("true", unreachable_s=0.05))["state"] == EndState.JOB_UNREACHABLE
    assert set(questions) == {"logs"}


def test_a_look_at_a_silent_server_occupies_no_thread_of_all_triggers(asks, launch_by):
    """Some of them kept the looks at healthy jobs waiting, until these counted as out of reach."""
    looks, answers = threading.Event(), threading.Event()

    class Silent(LocalLauncher):
        def logs(self, key, offset=0):
            looks.set()
            answers.wait(10.0)
            return super().logs(key, offset)

    launch_by(lambda place: Silent(place=replace(place, address="")), "local")
    trigger = asks("echo it")

    async def run():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        first = asyncio.ensure_future(anext(trigger.run()))
        while not looks.is_set():
            await asyncio.sleep(0.02)
        await asyncio.wait_for(asyncio.to_thread(answers.set), 5.0)
        event = await first
        await trigger.cleanup()
        return event.payload

    assert asyncio.run(run())["last_line"] == "it"


def test_a_job_whose_output_never_comes_has_ended_all_the_same(asks, manager):
    """As where the driver of a container's log is `none`: its GPUs stayed allocated after its end."""
    log = '"${GPU_JOB_LOCK%/lock}"/log'
    event = fire(asks(f"echo lost; rm {log}; mkdir {log}; exit 4", unreachable_s=0.3))
    assert (event["state"], event["exit_code"]) == (EndState.JOB_ENDED, 4)
    assert manager.leases() == []


@pytest.mark.parametrize("silent", [2, 1000], ids=["for a moment", "for good"])
def test_a_job_that_ended_well_as_its_server_fell_silent_has_succeeded_and_keeps_its_gpus_until_that_answers(
    asks, manager, monkeypatch, capsys, silent
):
    real, calls = LocalLauncher.stop, []

    def stop(launcher, key, grace_s=10.0):
        calls.append(key)
        if len(calls) <= silent:
            raise LauncherUnreachableError("its server does not answer")
        return real(launcher, key, grace_s)

    with monkeypatch.context() as context:
        context.setattr(LocalLauncher, "stop", stop)
        event = fire(asks("true", unreachable_s=0.5))
    is_back = silent == 2
    assert (event["state"], event["exit_code"]) == (EndState.JOB_ENDED, 0)
    assert (manager.leases() == []) == is_back
    assert outcomes(manager) == ["SUCCESS"] * is_back
    assert is_back or "its job may still run: its server does not answer" in capsys.readouterr().out


def test_a_plan_that_a_triggerer_of_another_version_cannot_read_fails_its_task_alone(asks):
    """Airflow takes a TypeError so; by any other error the triggerer ends, with the triggers of all tasks."""
    with pytest.raises(TypeError, match=f"plan of {TASK.lease_id} cannot be made .*'most' is not a valid"):
        again(asks("true"), done_when="most")


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_killed_trigger_drops_an_end_that_nobody_will_collect(asks, wanted, variables, is_wanted):
    """As of a run that ends by its `dagrun_timeout`: Airflow tells no listener."""
    trigger = asks("true")
    task_results.keep_end(TASK, TaskEnd(state="job_ended", exit_code=0))
    wanted(is_wanted)
    asyncio.run(trigger.on_kill())
    assert bool(variables) is is_wanted


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_killed_trigger_ends_only_a_job_whose_task_has_ended(asks, manager, notes, wanted, is_wanted):
    trigger = asks("sleep 60")
    until(trigger, lambda: "job_log_place" in notes)
    wanted(is_wanted)
    asyncio.run(trigger.on_kill())
    assert bool(manager.leases()) is is_wanted
    assert is_wanted or manager.history(what="release")[0]["by"] == "airflow:test/d/t"
    expected = JobState.RUNNING if is_wanted else JobState.ABSENT
    assert [state_of(key) for key in job_keys(notes)] == [expected]


def test_a_cancelled_trigger_awaits_the_start_that_is_under_way(asks, launch_by):
    """So that no thread starts a job after its triggerer said that it has stopped."""
    begins, ends = threading.Event(), threading.Event()

    class Slow(LocalLauncher):
        def start(self, job):
            begins.set()
            time.sleep(0.5)
            super().start(job)
            ends.set()

    launch_by(lambda place: Slow(place=place), "local")
    until(asks("sleep 60"), begins.is_set)
    assert ends.is_set()


# ---- preemption ----


@pytest.fixture
def take(manager):
    """Return a function by which a stronger request takes the lease of the task."""
    redefine(manager, teams=Teams((Team("vision", 32),), True, 0.0, 0.0))

    def take():
        lease = manager.status_of(TASK.lease_id)
        manager.submit("stronger", 8, team="vision", server=lease["server_name"])

    return take


@pytest.mark.parametrize(("code", "tries"), [(75, 2), (0, 1)])
def test_a_preempted_job_saves_what_it_did_and_its_task_waits_again(
    asks, manager, take, tmp_path, capsys, code, tries
):
    """One that still ends with exit code 0 has succeeded."""
    trap = f"trap 'echo saved; exit {code}' TERM; echo $GPU_RESTART_COUNT >> {tmp_path}/up"
    trigger = asks(f"{trap}; [ $GPU_RESTART_COUNT = 1 ] || while :; do sleep 0.05; done")

    def taken():
        wait_for(lambda: (tmp_path / "up").exists())
        take()
        threading.Timer(2.0, lambda: manager.release("stronger")).start()

    fire(trigger, taken)
    said = capsys.readouterr().out
    assert "its job has" in said
    assert "to save what it did" in said
    assert is_logged("saved", said)
    assert (tmp_path / "up").read_text().split() == ["0", "1"][:tries]
    assert outcomes(manager)[:1] == (["PREEMPTED"] if tries > 1 else ["SUCCESS"])


def test_a_job_whose_lease_is_taken_before_it_begins_waits_again(asks, manager, connect, take, tmp_path):
    calls = []

    def taken(*given, **more):
        calls.append(1)
        if len(calls) == 1:
            take()
        return manager.place_job(*given, **more)

    connect(Mock(wraps=manager, place_job=taken))
    assert fire(asks(f"echo $GPU_RESTART_COUNT >> {tmp_path}/up"))["exit_code"] == 0
    assert (tmp_path / "up").read_text() == "1\n"
    assert outcomes(manager) == ["PREEMPTED", "SUCCESS"]


@pytest.mark.parametrize("ends", ["by itself", "in its grace"])
def test_a_job_that_was_told_of_a_preemption_that_is_taken_back_waits_again(
    asks, manager, take, tmp_path, ends
):
    """Another triggerer told it, and died."""
    goes_on = "exit 75" if ends == "by itself" else "true"
    trap = f"trap '{goes_on}' TERM; echo $GPU_RESTART_COUNT >> {tmp_path}/up"
    trigger = asks(f"{trap}; [ $GPU_RESTART_COUNT = 1 ] || while :; do sleep 0.05; done", preempt_grace=1.0)
    until(trigger, lambda: (tmp_path / "up").exists())
    take()
    [lease] = manager.preempting()
    present(GangJob.of(lease)).preempt(1.0, "TERM", 0.1)
    manager.cancel("stronger")
    assert manager.status_of(TASK.lease_id)["state"] == "RUNNING"
    fire(again(trigger))
    assert (tmp_path / "up").read_text().split() == ["0", "1"]
    assert outcomes(manager) == ["PREEMPTED", "SUCCESS"]


def test_a_task_whose_job_was_told_and_ended_while_airflow_was_stopped_waits_again(
    asks, manager, take, tmp_path
):
    """By its agent; its lease was quarantined meanwhile."""
    trap = f"trap 'exit 143' TERM; echo $GPU_RESTART_COUNT >> {tmp_path}/up"
    trigger = asks(f"{trap}; [ $GPU_RESTART_COUNT = 1 ] || while :; do sleep 0.05; done", preempt_grace=0.5)
    until(trigger, lambda: (tmp_path / "up").exists())
    take()
    [lease] = manager.preempting()
    assert present(GangJob.of(lease)).preempt(0.5, "TERM", 5.0).is_over

    def is_quarantined():
        manager.expire_and_schedule()
        return manager.status_of(TASK.lease_id)["quarantined"]

    wait_for(is_quarantined)
    assert fire(again(trigger))["exit_code"] == 0
    assert (tmp_path / "up").read_text().split() == ["0", "1"]
    assert outcomes(manager) == ["PREEMPTED", "SUCCESS"]


def test_a_wait_counts_from_the_preemption_not_from_the_first_request(asks, manager, take, notes, tmp_path):
    trigger = asks(f"trap 'exit 75' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done")
    until(trigger, lambda: (tmp_path / "up").exists())
    for number in range(1, 4):
        manager.submit(f"holds{number}", 8, server=f"gpu-server-{number}", team="vision")
    take()
    until(again(trigger), lambda: notes.get("gpu_task", {}).get("restarts") == 1)
    [waiting] = [entry for entry in manager.queue() if entry["task_id"] == TASK.lease_id]
    assert 0.0 < notes["gpu_task"]["before_s"] <= waiting["waited_s"]


def test_a_preempted_job_that_cannot_be_reached_keeps_its_gpus(
    asks, manager, take, monkeypatch, pause, said_by, tmp_path
):
    pause({"airflow.task_trigger.trigger.UNREACHABLE_PAUSE_S": 0.05})
    trigger = asks(f"trap 'exit 75' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done")
    until(trigger, lambda: (tmp_path / "up").exists())
    take()
    second = again(trigger)
    said = said_by(second, logging.ERROR)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("resource_manager.jobs.directories.job_files.machine", lambda: "another")
        until(second, lambda: said)
    assert "its GPUs stay allocated until the job is known to be gone" in said[0]
    assert manager.status_of(TASK.lease_id)["state"] == "PREEMPTING"
    until(again(trigger), lambda: manager.status_of("stronger")["state"] == "RUNNING")


def test_a_task_whose_lease_another_process_queued_again_goes_on(asks, manager, take, tmp_path):
    """As the reconciler does where it comes first."""
    command = f"echo run >> {tmp_path}/runs; [ -e {tmp_path}/over ] || sleep 60"
    trigger = asks(command)

    def queue():
        wait_for(lambda: (tmp_path / "runs").exists())
        (tmp_path / "over").touch()
        take()
        [lease] = manager.preempting()
        gang = present(GangJob.of(lease))
        gang.preempt(5.0, "TERM", 5.0)
        queue_again(manager, lease, gang)
        manager.release("stronger")

    assert fire(trigger, queue)["exit_code"] == 0
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
    assert [outcome for outcome in outcomes(manager) if outcome] == ["PREEMPTED", "SUCCESS"]


# ---- limits: what ends a lease though nobody else wants its GPUs ----

SAVES = "trap 'exit 75' TERM; echo $GPU_RESTART_COUNT >> {}/up; while :; do sleep 0.05; done"


def test_a_job_is_ended_at_its_longest_runtime_and_its_task_has_timed_out(asks, manager, tmp_path):
    event = fire(asks(SAVES.format(tmp_path), preempt_grace=1, max_runtime=2))
    assert event["state"] == EndState.TIMED_OUT
    assert event["detail"] == "the job was ended, preempted: its longest runtime is over"
    assert outcomes(manager) == ["TIMED_OUT"]
    assert manager.leases() == manager.queue() == []


def test_a_job_gives_its_gpus_back_after_its_turn_and_goes_on_later(asks, manager, tmp_path):
    more = "[ $GPU_RESTART_COUNT = 1 ] || "
    command = SAVES.format(tmp_path).replace("while", f"{more}while")
    assert fire(asks(command, preempt_grace=1, requeue_after=2))["exit_code"] == 0
    assert (tmp_path / "up").read_text().split() == ["0", "1"]
    assert outcomes(manager) == ["PREEMPTED", "SUCCESS"]


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
@pytest.mark.parametrize("on_idle", ["end", "requeue"])
def test_an_idle_job_is_told_and_ended_and_waits_again_if_it_asked_for_that(asks, manager, tmp_path, on_idle):
    again = "" if on_idle == "end" else "[ $GPU_RESTART_COUNT = 1 ] || "
    command = SAVES.format(tmp_path).replace("while", f"{again}while")
    trigger = asks(command, idle_action="release", idle_after=0.1, on_idle=on_idle)

    def idles():
        wait_for(lambda: (tmp_path / "up").exists())
        for _ in range(2):
            report_of(manager, utilization_percent=0)
            time.sleep(0.2)
        wait_for(lambda: outcomes(manager) and not manager.leases())
        report_of(manager, utilization_percent=0)  # they are clean

    event = fire(trigger, idles)
    if on_idle == "end":
        assert event["state"] == EndState.IDLE
        assert event["detail"] == "the job was ended, preempted: its GPUs computed nothing for too long"
    assert outcomes(manager) == ["IDLE"] + ["SUCCESS"] * (on_idle == "requeue")


@pytest.mark.parametrize(
    "gpu_inventory", [[Node("gpu-a", 0, {"cpus": 8}, (Gpu(0), Gpu(1)), address="192.0.2.7")]]
)
def test_the_launcher_local_starts_no_job_of_a_server_that_is_another_machine(
    asks, manager, own_address_only, monkeypatch
):
    event = fire(asks("echo begun"))
    assert event == {
        "state": EndState.NOT_STARTED,
        "detail": f"server gpu-a (address 192.0.2.7) is not this machine, {socket.gethostname()}, where "
        "launcher 'local' would run the job: set launcher='ssh', or GPU_MANAGER_SERVER=gpu-a if this is "
        "that server",
    }
    assert manager.leases() == []
    monkeypatch.setenv("GPU_MANAGER_SERVER", "gpu-a")
    assert fire(asks("echo begun"))["last_line"] == "begun"
