"""Trigger of a gang: which end is the gang's, and what becomes of the others."""

import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from datetime import timedelta

    from resource_manager.airflow import GPUTrainingOperator
    from resource_manager.airflow.task_trigger.events import EndState

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.jobs.launchers import LAUNCHERS, JobState, LauncherUnreachableError
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.running_job import RunningJob
from resource_manager.manager.agent_jobs import opened_service
from tests.airflow.tasks import TASK, again, asked, fire, until

pytestmark = pytest.mark.usefixtures("wanted")

SLEEP = "exec sleep 600"


@pytest.fixture
def gpu_inventory():
    return [
        Node(f"gpu-{number}", number, {"cpus": 8}, (Gpu(0), Gpu(1)), f"127.0.0.{number + 1}")
        for number in range(3)
    ]


@pytest.fixture
def asks(manager, notes, monkeypatch, pause, tmp_path, fast_triggers):
    """Return a function that returns the trigger of a gang of three whose servers are all this machine."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    # On a busy machine one read takes longer than `fast_triggers` allows; the member then counts as running.
    pause({"airflow.task_trigger.member_watch.READ_S": 5.0})

    def ask(command, unreachable_s=600.0, **more):
        more = {"stale_grace_s": 5.0, "unreachable_timeout": timedelta(seconds=unreachable_s), **more}
        return asked(GPUTrainingOperator(task_id="t", gpus=2, nodes=3, command=command, **more))

    yield ask
    for key in running():
        LocalLauncher().stop(key, 0)


def running():
    """Return the keys of the jobs that run."""
    with suppress(LauncherUnreachableError):  # none was prepared yet
        return LocalLauncher().running()
    return []


@pytest.fixture
def gone(launch_by):
    """Return the states of the members' jobs, by rank, when their lease ended."""
    states: dict[int, Any] = {}

    class Noting(LocalLauncher):
        def stop(self, key, grace_s=10.0):
            states.setdefault(int(key.rpartition(".")[2]), self.status(key).state)
            super().stop(key, grace_s)

    launch_by(lambda place: Noting(place=replace(place, address="")), "local")
    return states


def cut_off(monkeypatch, rank, answer):
    """Let the server of that rank answer any question about its job by calling `answer`."""
    local = LAUNCHERS["local"]

    class Cut:
        def __init__(self, place):
            self._launcher = local(place)

        def __getattr__(self, name):
            def call(key, *more):
                return answer() if key.endswith(f".{rank}") else getattr(self._launcher, name)(key, *more)

            return self._launcher.close if name == "close" else call

    monkeypatch.setitem(LAUNCHERS, "local", Cut)


def of_rank(rank, command, others=SLEEP):
    return f"if [ $GPU_NODE_RANK = {rank} ]; then {command}; else {others}; fi"


def test_a_gang_ends_when_all_members_have_ended(asks, manager, gone, capsys):
    event = fire(asks("sleep 0.$GPU_NODE_RANK; echo rank $GPU_NODE_RANK ends"))
    assert event == {"state": EndState.JOB_ENDED, "exit_code": 0, "last_line": "rank 0 ends"}
    assert "rank 1 ends" not in capsys.readouterr().out
    assert gone == dict.fromkeys(range(3), JobState.FINISHED)
    assert manager.leases() == []


def test_jobs_are_asked_for_by_the_service_of_their_own_task(asks, manager, launch_by):
    """A triggerer has tasks of several connections, and another one's service may show nothing of a job."""
    services = []

    class Noting(LocalLauncher):
        def status(self, key):
            services.append(opened_service())
            return super().status(key)

    launch_by(lambda place: Noting(place=replace(place, address="")), "local")
    trigger = asks("sleep 0.5")
    with GPUResourceManager.from_url("memory://") as other:
        assert fire(trigger)["state"] == EndState.JOB_ENDED
    assert services
    assert other not in services
    assert set(services) == {manager}


def test_a_gang_can_end_with_its_rank_0(asks, gone):
    trigger = asks(of_rank(0, "echo done"), done_when="rank0")
    assert fire(trigger) == {"state": EndState.JOB_ENDED, "exit_code": 0, "last_line": "done"}
    assert gone == dict.fromkeys(range(3), JobState.FINISHED)


def test_the_first_failure_ends_the_others_and_is_the_gangs(asks, gone, tmp_path):
    begun = tmp_path / "begun"  # a member that is ended before its shell has begun leaves no exit code
    fails_later = f"trap 'exit 9' TERM; touch {begun}-$GPU_NODE_RANK; {SLEEP[5:]} & wait"
    others_begin = f"until [ -e {begun}-0 ] && [ -e {begun}-1 ]; do sleep 0.02; done"
    event = fire(asks(of_rank(2, f"{others_begin}; echo cause of it; exit 3", fails_later)))
    assert event == {
        "state": EndState.JOB_ENDED,
        "exit_code": 3,
        "last_line": "cause of it",
        "rank": 2,
        "server": "gpu-2",
        "tails": {"2": ["cause of it"], "1": event["tails"]["1"]},
    }
    assert gone == dict.fromkeys(range(3), JobState.FINISHED)


def test_a_member_that_ignores_sigterm_is_killed_after_the_grace_while_the_lease_is_renewed(asks, manager):
    stubborn = "trap '' TERM; while :; do sleep 0.1; done"
    trigger = again(asks(of_rank(0, "exit 4", stubborn), stale_grace_s=1.0), ttl_s=0.9)
    assert fire(trigger)["exit_code"] == 4
    assert manager.history(what="renew")
    assert running() == manager.leases() == []


def test_a_member_that_vanished_is_the_cause_of_the_others_ends(asks, tmp_path):
    begun = tmp_path / "begun"  # to start three members may take longer than the others wait
    later = f"until [ -e {begun} ]; do sleep 0.05; done; sleep 0.2; exit 1"
    event = fire(asks(of_rank(1, f"touch {begun}; kill -9 0", later)))
    assert event["rank"] == 1
    assert "exit_code" not in event


def test_members_within_reach_are_ended_if_another_stays_out_of_reach(
    asks, manager, notes, monkeypatch, gone
):
    trigger = asks(SLEEP, unreachable_s=0.3)
    until(trigger, lambda: "started_at" in notes.get("gpu_task", {}))

    def unreachable():
        raise LauncherUnreachableError("no answer")

    with monkeypatch.context() as cut:
        cut_off(cut, 2, unreachable)
        event = fire(again(trigger))
    assert (event["state"], event["rank"], event["server"]) == (EndState.JOB_UNREACHABLE, 2, "gpu-2")
    assert "no answer" in event["detail"]
    assert gone == dict.fromkeys(range(2), JobState.FINISHED)
    [rest] = manager.leases()
    assert [member["rank"] for member in rest["members"]] == [2]
    assert [key[-2:] for key in running()] == [".2"]


@pytest.mark.parametrize("others", [SLEEP, "exit 3"])
def test_a_server_that_never_answers_does_not_hold_up_the_end_of_the_others(
    asks, manager, notes, monkeypatch, pause, others, tmp_path
):
    goes_on = f"until [ -e {tmp_path}/goes-on ]; do sleep 0.05; done; {others}"
    trigger = asks(of_rank(2, SLEEP, goes_on), unreachable_s=0.3 if others == SLEEP else 30.0)
    until(trigger, lambda: "started_at" in notes.get("gpu_task", {}))
    (tmp_path / "goes-on").touch()
    pause({"airflow.task_trigger.job_watch.LOOK_S": 0.3})
    answer = threading.Event()

    def silent():
        if not answer.wait(3):
            raise LauncherUnreachableError("no answer")

    with monkeypatch.context() as cut:
        cut_off(cut, 2, silent)
        event = fire(again(trigger))
        answer.set()
    expected = EndState.JOB_UNREACHABLE if others == SLEEP else EndState.JOB_ENDED
    assert event["state"] == expected
    assert [key[-2:] for key in running()] == [".2"]
    assert RunningJob.all_of(manager.leases()[0])[-1].rank == 2


def test_all_members_of_a_gang_without_a_lease_are_stopped(asks, manager):
    trigger = again(asks(SLEEP), ttl_s=0.1)
    until(trigger, lambda: len(running()) == 3)

    def lose():
        manager.release(TASK.lease_id, job_end="gone", reason="by mistake")

    event = fire(again(trigger), lose)
    who = f"{manager.history()[-1]['by']} released its lease: by mistake"
    assert event == {"state": EndState.LEASE_LOST, "detail": who}
    assert running() == []
