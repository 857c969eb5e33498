"""Trigger that watches a job: its log, renewals, timeout and end."""

import asyncio
import json
import re
import threading
import warnings
from contextlib import closing
from dataclasses import asdict, replace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import triggers
    from resource_manager.airflow.triggers import JobTrigger, TriggerState
    from resource_manager.airflow.use_meter import UseMeter, usage_line

from resource_manager.core.changes import GpuClosed
from resource_manager.core.maintenance import as_text as utc
from resource_manager.core.teams import Team, Teams
from resource_manager.jobs import reconcile
from resource_manager.jobs.launchers import Job, JobState
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.running_job import RunningJob
from resource_manager.manager.maintenance import WindowForm
from tests.agent.reporting import server
from tests.airflow.asking import ask, report_of
from tests.airflow.tasks import TASK, fire
from tests.builders import redefine
from tests.eventually import wait_for
from tests.jobs.gangs import place


@pytest.fixture
def notes():
    """Values that triggers stored in Airflow."""
    return {}


@pytest.fixture
def trained(manager, notes, monkeypatch, tmp_path, fast_triggers):
    """Return a function that starts a job under a lease and returns the trigger that watches it."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))

    async def note(identity, key, value):
        notes[identity, key] = json.loads(json.dumps(value))

    async def noted(identity, key):
        return notes.get((identity, key))

    monkeypatch.setattr(triggers, "note", note)
    monkeypatch.setattr(triggers, "noted", noted)

    def start(command, idle_after=None, **arguments):
        allocation = place(manager, ask(manager, TASK, 2, idle_after=idle_after))
        [job] = RunningJob.all_of(allocation)
        with closing(job.open()) as launcher:
            launcher.start(Job(job.key, ("/bin/sh", "-c", command)))
        return JobTrigger(asdict(TASK), [job.to_dict()], **{"ttl_s": 60.0, **arguments})

    yield start
    entry = manager.status_of(TASK.lease_id)
    if entry is not None:
        reconcile.end(manager, entry)


def is_logged(line, output):
    """Return True if the line is in the log, in the form of Airflow 3.0 or that of later ones."""
    return re.search(rf"(\[info +\]|INFO -) {line}\b", output) is not None


def test_the_job_trigger_reports_exit_code_and_last_line(trained):
    assert fire(trained("echo one; echo two; echo; exit 4")) == {
        "state": TriggerState.JOB_ENDED,
        "exit_code": 4,
        "last_line": "two",
    }


def test_a_look_at_a_job_asks_its_server_once(trained, monkeypatch):
    """Each question is a command by ssh: the output comes with the status."""
    asked = []
    for name in ("status", "logs"):
        ask_server = getattr(LocalLauncher, name)

        def asking(launcher, key, *more, name=name, ask_server=ask_server):
            asked.append(name)
            return ask_server(launcher, key, *more)

        monkeypatch.setattr(LocalLauncher, name, asking)
    assert fire(trained("exit 3"))["exit_code"] == 3
    assert set(asked) == {"logs"}


def test_the_job_trigger_renews_while_the_job_runs(trained, manager):
    trigger = trained("sleep 0.6", ttl_s=0.2)
    before = manager.status_of(TASK.lease_id)["expires_at"]
    assert fire(trigger)["exit_code"] == 0
    assert manager.status_of(TASK.lease_id)["expires_at"] > before
    assert {change["by"] for change in manager.history(what="renew")} == {"airflow:test/d/t"}


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_the_use_of_the_gpus_is_measured_while_the_job_runs(trained, manager, monkeypatch, tmp_path):
    monkeypatch.setattr(triggers, "MEASURE_EVERY_S", 0.0)
    report_of(manager, utilization_percent=71, memory_used_mib=63488)
    measured = tmp_path / "measured"
    add = UseMeter.add

    def added(meter, gpus):
        add(meter, gpus)
        measured.touch()

    monkeypatch.setattr(UseMeter, "add", added)
    event = fire(trained(f"until [ -e {measured} ]; do sleep 0.05; done; echo over"))
    assert (event["state"], event["last_line"]) == (TriggerState.JOB_ENDED, "over")
    usage = event["gpu_usage"]
    assert usage.pop("samples") >= 2
    assert usage == {"mean_utilization_percent": 71.0, "peak_memory_mib": 63488, "memory_mib": 81920}
    line = "GPU use while this job ran: mean 71 %, peak memory 62 of 80 GB"
    assert usage_line(usage) == line


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_a_task_whose_gpus_compute_nothing_for_too_long_is_told_so_once(
    trained, manager, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(triggers, "MEASURE_EVERY_S", 0.0)
    measured, add = [], UseMeter.add

    def added(meter, gpus):
        add(meter, gpus)
        measured.append(gpus)
        if len(measured) > 2:
            (tmp_path / "measured").touch()

    monkeypatch.setattr(UseMeter, "add", added)
    job = trained(f"until [ -e {tmp_path / 'measured'} ]; do sleep 0.05; done", idle_after=1e-6)
    report_of(manager, utilization_percent=0)
    fire(job)
    assert capsys.readouterr().out.count("the GPUs of this task have computed nothing for 0 s") == 1


def test_a_job_that_runs_on_under_maintenance_is_told_so_once(
    trained, manager, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("resource_manager.airflow.shared_manager.WINDOWS_EVERY_S", 0.0)
    read, seen = manager.maintenance, []

    def counted():
        seen.append(1)
        if len(seen) > 3:
            (tmp_path / "seen").touch()
        return read()

    monkeypatch.setattr(type(manager), "maintenance", lambda self: counted())
    job = trained(f"until [ -e {tmp_path / 'seen'} ]; do sleep 0.05; done")
    begin = manager.store.now() - 60.0
    server = manager.leases()[0]["server_name"]
    window = {"from": utc(begin), "until": utc(begin + 3600.0), "reason": "new fans"}
    manager.add_maintenance(WindowForm.of(**window, servers=[server]))
    fire(job)
    output = capsys.readouterr().out
    assert output.count("its servers are under maintenance") == 1
    assert "new fans" in output


def test_without_reports_nothing_is_said_of_the_use(trained, monkeypatch):
    monkeypatch.setattr(triggers, "MEASURE_EVERY_S", 0.0)
    assert "gpu_usage" not in fire(trained("sleep 0.3"))


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
    assert is_logged("one", capsys.readouterr().out)
    assert fire(second)["last_line"] == "two"
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


@pytest.mark.parametrize("job_end", ["gone", "forced"])
def test_a_job_whose_lease_was_ended_by_another_client_is_stopped(trained, manager, job_end):
    trigger = trained("sleep 60", ttl_s=0.1)
    event = fire(trigger, lambda: manager.release(TASK.lease_id, job_end=job_end, reason="by mistake"))
    assert event == {"state": TriggerState.LEASE_LOST}
    with closing(trigger.jobs[0].open()) as launcher:
        assert launcher.status(trigger.jobs[0].key).state is JobState.ABSENT


def test_a_job_whose_gpu_failed_is_stopped_with_that_reason(trained, manager, monkeypatch):
    monkeypatch.setattr(triggers, "GPU_POLL_S", 0.05)
    trigger = trained("sleep 600", stale_grace_s=0.2)
    lease = manager.status_of(TASK.lease_id)
    node, gpu_id = lease["server_name"], lease["gpu_ids"][0]
    manager.commit(lambda cluster, now: [GpuClosed(node, gpu_id, "", "xid 48; double bit ECC", now)])
    assert manager.status_of(TASK.lease_id)["gpu_failed"] == "", "its holder goes on"
    manager.commit(lambda cluster, now: [GpuClosed(node, gpu_id, "", "xid 79; lost", now, stop=True)])
    assert fire(trigger) == {"state": TriggerState.GPU_FAILED, "detail": "xid 79; lost"}
    [job] = RunningJob.all_of(lease)
    with closing(job.open()) as launcher:
        assert launcher.status(job.key).state is not JobState.RUNNING
    assert manager.status_of(TASK.lease_id) is not None, "the operator ends the lease"


def test_the_job_trigger_fires_after_timeout_or_if_unreachable(trained):
    assert fire(trained("sleep 60", timeout_s=0.05)) == {"state": TriggerState.TIMED_OUT}
    lost = trained("sleep 60", unreachable_s=0.05)
    lost.jobs = (replace(lost.jobs[0], place=replace(lost.jobs[0].place, machine="elsewhere")),)
    assert fire(lost)["state"] == TriggerState.JOB_UNREACHABLE


@pytest.mark.parametrize("wanted", [True, False])
def test_a_killed_trigger_ends_only_a_job_whose_task_has_ended(trained, manager, monkeypatch, wanted):
    trigger = trained("sleep 60")
    monkeypatch.setattr(triggers, "is_wanted", lambda identity: wanted)
    asyncio.run(trigger.on_kill())
    assert bool(manager.leases()) is wanted
    assert wanted or manager.history(what="release")[0]["by"] == "airflow:test/d/t"
    with closing(trigger.jobs[0].open()) as launcher:
        expected = JobState.RUNNING if wanted else JobState.ABSENT
        assert launcher.status(trigger.jobs[0].key).state is expected


@pytest.fixture
def take(manager):
    """Return a function by which a stronger request takes the lease of the task."""
    redefine(manager, teams=Teams((Team("vision", 32),), True, 0.0, 0.0))

    def take():
        [lease] = manager.leases()
        manager.submit("stronger", 8, team="vision", server=lease["server_name"])

    return take


def test_a_preempted_job_is_told_before_airflow_resumes_its_task(trained, manager, take, tmp_path, capsys):
    """Its grace begins then, however late a worker is free."""
    trap = f"trap 'touch {tmp_path}/told; exit 75' TERM; touch {tmp_path}/up"
    job = trained(f"{trap}; while :; do sleep 0.05; done")
    wait_for(lambda: (tmp_path / "up").exists())
    take()
    assert fire(job) == {"state": TriggerState.PREEMPTED}
    wait_for(lambda: (tmp_path / "told").exists())
    assert "the lease is preempted; the job has" in capsys.readouterr().out
    [lease] = manager.leases()
    assert lease["state"] == "PREEMPTING"  # until the operator has ended what is left of the job


def test_a_server_that_is_slow_to_answer_does_not_hold_up_the_end_of_a_preempted_job(
    trained, take, monkeypatch
):
    said, over = [], threading.Event()

    def warn(text, *values):
        said.append(text)
        if "told later" in text:
            over.set()

    job = trained("sleep 60")
    take()
    monkeypatch.setattr(triggers, "LOOK_S", 0.05)
    monkeypatch.setattr(triggers.GangJob, "preempt", lambda *_: over.wait(30))
    monkeypatch.setattr(job.log, "warning", warn)
    assert fire(job) == {"state": TriggerState.PREEMPTED}
    assert said == [
        "the lease is preempted; the job has %.1f s to save what it did",
        "its server does not answer; the job is told later",
    ]
