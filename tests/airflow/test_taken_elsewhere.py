"""Lease of `with_gpus` that is taken while its job runs elsewhere: the job is told, and not the worker."""

import math
import queue
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk import BaseOperator

    from resource_manager.airflow import lease_renewal, with_gpus
    from resource_manager.airflow.leased_operators.kinds import KINDS, KindElsewhere
    from resource_manager.airflow.version_compat import AirflowException

from resource_manager.core.models import Gpu, JobPlace, Node
from resource_manager.errors import LeaseNotFoundError
from resource_manager.jobs.launchers import JobState, JobStatus, LauncherUnreachableError
from resource_manager.jobs.launchers.fake import FakeLauncher
from resource_manager.manager.recorded_changes import LEASE_GONE
from tests.airflow.tasks import context_of


class Launcher(FakeLauncher):
    """Launcher of jobs that end, or whose server does not answer, as `answers` says of each time told.

    `begun` is called once a job runs.
    """

    def __init__(self, answers, begun):
        super().__init__()
        self.answers, self.begun, self.told = list(answers), begun, []

    def preempt(self, key, grace_s, signal_name="TERM", wait_s=0.0):
        answer = self.answers.pop(0)
        if callable(answer):
            answer()
        if answer == "silent":
            raise LauncherUnreachableError("gpu-a does not answer")
        self.told.append((grace_s, signal_name, wait_s))
        return super().preempt(key, grace_s) if answer == "ends" else self.status(key)


class Follows(BaseOperator):
    """Operator that starts its job on a server and waits for its end, as `SSHOperator` does."""

    conn_id = None
    launcher: Any
    job: Any

    def execute(self, context):
        self.launcher.start(self.job)
        self.launcher.begun()
        gives_up_at = time.monotonic() + 20
        while (status := self.launcher.status(self.job.key)).state is JobState.RUNNING:
            if time.monotonic() > gives_up_at:
                break
            time.sleep(0.01)
        raise AirflowException(f"exit status = {status.exit_code}")


def start(operator, launcher, job, address):
    operator.launcher, operator.job = launcher, job


@pytest.fixture
def gpu_inventory():
    return [Node("gpu-a", 0, {"cpus": 8}, (Gpu(0), Gpu(1)), address="192.0.2.7")]


@pytest.fixture
def taken(manager, launch_by, at_worker_kill, monkeypatch):
    """Return taken(*answers): run a job whose lease is taken; return its launcher and the worker signals."""
    kind = KindElsewhere(launcher="ssh", connection="conn_id", start=start)
    monkeypatch.setitem(KINDS, f"{__name__}.Follows", kind)

    def take(*answers, begun=lambda: None, **demand):
        launcher = Launcher(answers, begun)
        signals: list[int] = []
        launcher.runs()
        launch_by(lambda place: launcher, "ssh")
        at_worker_kill(signals.append)
        follow = with_gpus(Follows, gpus=1, ttl=1, **demand)(task_id="t", owner="")
        with pytest.raises(AirflowException, match="exit status = 143"):
            follow.execute(context_of())
        assert manager.leases() == []
        return launcher, signals

    return take


LIMITS = {"max_runtime": 0.5, "preempt_grace": 0.2}


def test_a_job_elsewhere_is_told_until_it_has_ended_and_its_worker_is_not(taken, manager, pause):
    pause({"airflow.lease_renewal.POLL_S": 0.01})
    launcher, signals = taken("silent", "runs", "ends", preempt_signal="USR2", **LIMITS)
    assert [(signal, wait_s) for _, signal, wait_s in launcher.told] == [("USR2", 5.0)] * 2
    assert all(0.1 <= grace_s <= 0.2 for grace_s, _, _ in launcher.told)
    assert (len(launcher.stopped), signals) == (1, [])
    [end] = [event for event in manager.history(0) if "outcome" in event]
    assert (end["outcome"], end["reason"]) == ("TIMED_OUT", "exit code 143")


def test_the_log_says_that_a_job_elsewhere_has_to_end_and_could_not_be_told_yet(taken, pause, capfd):
    pause({"airflow.lease_renewal.POLL_S": 0.01})
    taken("silent", "runs", "runs", "ends", **LIMITS)
    said = capfd.readouterr().out
    assert said.count("its longest runtime is over; this task has 0.") == 2, "once more, as it was not told"
    assert said.count("its command cannot be told that it has to end, trying again: gpu-a does not") == 1


def test_a_job_elsewhere_that_was_told_ends_though_its_preemption_is_taken_back(taken, manager, pause):
    pause({"airflow.lease_renewal.POLL_S": 0.01})

    def begun():
        manager.submit("urgent", 2, 1, server="gpu-a", priority=9, expected_runtime=60)
        manager.preempt(manager.leases()[0]["task_id"], preemptor="urgent")

    def taken_back():
        manager.cancel("urgent")
        assert manager.leases()[0]["preempted_by"] is None

    launcher, _ = taken(taken_back, "ends", begun=begun, preemptible=True)
    assert len(launcher.told) == 2


TAKEN = {"gpu_failed": "", "preempted_by": "x", "reason": "", "preempt_grace_s": 600.0, "until": 600.0}
GIVEN_BACK = TAKEN | {"preempted_by": None}


@pytest.fixture
def keep(monkeypatch):
    """Return keep(leases, left): the waits of the thread that renews, and how a task ends.

    It renews with these answers, then its lease is gone; `left` are the answers of `tell`, the last again.
    """

    def run(leases, left):
        now, waits = [0.0], []
        ends: queue.Queue[str] = queue.Queue()
        answers, of_tell = iter([{}, *leases]), list(left)

        class Over(threading.Event):
            def wait(self, timeout=None):
                if threading.current_thread().name != "gpu-lease":
                    return super().wait(timeout)
                waits.append(timeout)
                now[0] += timeout
                return False

        def renew(*_, **__):
            answer = next(answers, None)
            if answer is None:
                raise LeaseNotFoundError("t")
            return answer

        def tell(lease):
            return of_tell.pop(0) if len(of_tell) > 1 else of_tell[0]

        monkeypatch.setattr(lease_renewal, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
        service: Any = SimpleNamespace(renew=renew)
        how: Any = {"ends_in_time": False, "clock": lambda: now[0], "end": ends.put, "tell": tell}
        with lease_renewal.kept_alive(service, "t", 1, 60.0, **how):
            end = ends.get(timeout=30)
        return waits, end

    return run


def test_a_job_elsewhere_is_looked_at_every_second_in_its_grace_and_not_only_at_a_renewal(keep):
    assert keep([TAKEN, TAKEN], [math.inf]) == ([15.0, 1.0, 1.0], LEASE_GONE)


TIME_OVER = "the lease was taken, and the time to save is over"


@pytest.mark.parametrize("left", [[None], [math.inf, None]], ids=["has not begun", "has ended"])
def test_a_task_of_a_taken_lease_whose_job_does_not_run_ends_with_its_grace(keep, left):
    waits, end = keep([TAKEN] * 400, left)
    assert (end, sum(waits)) == (TIME_OVER, 15.0 + len(left) - 1 + 300.0)


def test_a_job_that_begins_under_a_taken_lease_has_its_own_grace(keep):
    assert keep([TAKEN] * 400, [None, None, math.inf])[1] == LEASE_GONE


def test_a_lease_that_was_taken_back_before_its_job_began_is_as_if_never_taken(keep):
    waits, end = keep([TAKEN, *[GIVEN_BACK] * 40], [None, math.inf])
    assert (end, waits[:3], waits[-1]) == (LEASE_GONE, [15.0, 1.0, 15.0], 15.0)


@pytest.mark.parametrize(
    ("state", "left_s"),
    [(JobState.ABSENT, None), (JobState.FINISHED, None), (JobState.RUNNING, math.inf)],
)
def test_only_a_job_that_runs_is_told_that_its_lease_is_taken(manager, launch_by, state, left_s):
    launcher: Any = Launcher(["runs"], None)
    launcher.status = lambda key: JobStatus(state)
    launch_by(lambda place: launcher, "ssh")
    token = manager.submit("t", 1, 1)["fencing_token"]
    lease: Any = manager.place_job("t", [JobPlace("ssh", "192.0.2.7")], fencing_token=token)
    assert KindElsewhere(launcher="ssh").tell(None, lease | {"until": 0.0}) == left_s
