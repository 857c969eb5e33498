"""Trigger that watches the jobs of a gang: which end is the gang's, and what becomes of the others."""

import threading
import warnings
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import triggers
    from resource_manager.airflow.triggers import JobTrigger, TriggerState

from resource_manager.jobs.launchers import LAUNCHERS, JobState
from resource_manager.jobs.launchers.local import LocalLauncher
from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, fire
from tests.jobs.gangs import gang_allocation, gang_of

SLEEP = "exec sleep 600"


@pytest.fixture
def trained(manager, monkeypatch, tmp_path, fast_triggers):
    """Return a function that starts three members and returns the trigger that watches them."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))

    async def nothing(*_):
        return None

    monkeypatch.setattr(triggers, "note", nothing)
    monkeypatch.setattr(triggers, "noted", nothing)
    # On a busy machine one read takes longer than `fast_triggers` allows; the member then counts as running.
    monkeypatch.setattr("resource_manager.airflow.member_watch.READ_S", 5.0)
    started = []

    def start(command, **arguments):
        lease = ask(manager, TASK, 2)
        allocation = gang_allocation(token=lease["fencing_token"], lease_id=TASK.lease_id)
        gang, wanted = gang_of(allocation, command)
        gang.start(wanted)
        started.append(gang)
        jobs = [job.to_dict() for job in gang.jobs]
        return JobTrigger(asdict(TASK), jobs, **{"ttl_s": 60.0, "stale_grace_s": 5.0, **arguments})

    yield start
    for gang in started:
        for job in gang.jobs:
            LocalLauncher().stop(job.key, 0)


def of_rank(rank, command, others=SLEEP):
    return f"if [ $MY_RANK = {rank} ]; then {command}; else {others}; fi"


def states(trigger):
    return [LocalLauncher().status(job.key).state for job in trigger.jobs]


def test_a_gang_ends_when_all_members_have_ended(trained, capsys):
    trigger = trained("sleep 0.$MY_RANK; echo rank $MY_RANK ends")
    assert fire(trigger) == {
        "state": TriggerState.JOB_ENDED,
        "exit_code": 0,
        "last_line": "rank 0 ends",
    }
    assert "rank 1 ends" not in capsys.readouterr().out


def test_a_gang_can_end_with_its_rank_0(trained):
    trigger = trained(of_rank(0, "echo done"), done_when="rank0")
    assert fire(trigger) == {"state": TriggerState.JOB_ENDED, "exit_code": 0, "last_line": "done"}
    assert states(trigger) == [JobState.FINISHED] * 3
    again = JobTrigger(**trigger.serialize()[1])
    assert fire(again)["exit_code"] == 0  # the others were ended, so they did not end with 0


def test_the_first_failure_ends_the_others_and_is_the_gangs(trained, tmp_path):
    begun = tmp_path / "begun"  # a member that is ended before its shell has begun leaves no exit code
    fails_later = f"trap 'exit 9' TERM; touch {begun}-$MY_RANK; {SLEEP[5:]} & wait"
    others_begin = f"until [ -e {begun}-0 ] && [ -e {begun}-1 ]; do sleep 0.02; done"
    trigger = trained(of_rank(2, f"{others_begin}; echo cause of it; exit 3", fails_later))
    event = fire(trigger)
    assert event == {
        "state": TriggerState.JOB_ENDED,
        "exit_code": 3,
        "last_line": "cause of it",
        "rank": 2,
        "server": "gpu-2",
        "tails": {"2": ["cause of it"], "1": event["tails"]["1"]},
    }
    assert states(trigger) == [JobState.FINISHED] * 3
    assert fire(JobTrigger(**trigger.serialize()[1]))["rank"] == 2  # as the next triggerer would find it


def test_a_member_that_ignores_sigterm_is_killed_after_the_grace_while_the_lease_is_renewed(trained, manager):
    stubborn = "trap '' TERM; while :; do sleep 0.1; done"
    trigger = trained(of_rank(0, "exit 4", stubborn), stale_grace_s=1.0, ttl_s=0.9)
    before = manager.status_of(TASK.lease_id)["expires_at"]
    assert fire(trigger)["exit_code"] == 4
    assert states(trigger) == [JobState.FINISHED] * 3
    assert manager.status_of(TASK.lease_id)["expires_at"] > before


def test_a_member_that_vanished_is_the_cause_of_the_others_ends(trained, tmp_path):
    begun = tmp_path / "begun"  # to start three members may take longer than the others wait
    later = f"until [ -e {begun} ]; do sleep 0.05; done; sleep 0.2; exit 1"
    trigger = trained(of_rank(1, f"touch {begun}; kill -9 0", later))
    event = fire(trigger)
    assert (event["rank"], event["exit_code"]) == (1, None)


def test_members_within_reach_are_ended_if_another_stays_out_of_reach(trained):
    trigger = trained(SLEEP, unreachable_s=0.3)
    jobs = list(trigger.jobs)
    trigger.jobs = (*jobs[:2], replace(jobs[2], place=replace(jobs[2].place, machine="elsewhere")))
    event = fire(trigger)
    assert (event["state"], event["rank"], event["server"]) == (TriggerState.JOB_UNREACHABLE, 2, "gpu-2")
    assert "is on elsewhere" in event["detail"]
    assert states(trigger) == [JobState.FINISHED, JobState.FINISHED, JobState.RUNNING]


@pytest.mark.parametrize("others", [SLEEP, "exit 3"])
def test_a_server_that_never_answers_does_not_hold_up_the_end_of_the_others(trained, monkeypatch, others):
    trigger = trained(of_rank(2, SLEEP, others), unreachable_s=0.3)
    monkeypatch.setattr(triggers, "LOOK_S", 0.3)
    answer = threading.Event()
    silent = SimpleNamespace(status=lambda key: answer.wait(60), close=lambda: None)
    local = LAUNCHERS["local"]
    monkeypatch.setitem(
        LAUNCHERS, "local", lambda place: silent if place.address == "cut off" else local(place)
    )
    jobs = list(trigger.jobs)
    trigger.jobs = (*jobs[:2], replace(jobs[2], place=replace(jobs[2].place, address="cut off")))
    try:
        event = fire(trigger)
    finally:
        answer.set()
    expected = TriggerState.JOB_UNREACHABLE if others == SLEEP else TriggerState.JOB_ENDED
    assert event["state"] == expected
    assert states(trigger) == [JobState.FINISHED, JobState.FINISHED, JobState.RUNNING]


def test_all_members_of_a_gang_without_a_lease_are_stopped(trained, manager):
    trigger = trained(SLEEP, ttl_s=0.1)
    assert fire(trigger, lambda: manager.release(TASK.lease_id)) == {"state": "lease_lost"}
    assert states(trigger) == [JobState.ABSENT] * 3
