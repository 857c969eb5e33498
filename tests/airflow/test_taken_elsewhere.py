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

    from resource_manager.airflow import in_worker, with_gpus
    from resource_manager.airflow.leased_operators.kinds import KINDS, KindElsewhere
    from resource_manager.airflow.version_compat import AirflowException

from resource_manager.core.models import Gpu, Node
from resource_manager.errors import LeaseNotFoundError
from resource_manager.jobs.launchers import JobState, LauncherUnreachableError
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
    pause({"airflow.in_worker.POLL_S": 0.01})
    launcher, signals = taken("silent", "runs", "ends", preempt_signal="USR2", **LIMITS)
    assert [(signal, wait_s) for _, signal, wait_s in launcher.told] == [("USR2", 5.0)] * 2
    assert all(0.1 <= grace_s <= 0.2 for grace_s, _, _ in launcher.told)
    assert (len(launcher.stopped), signals) == (1, [])
    [end] = [event for event in manager.history(0) if "outcome" in event]
    assert (end["outcome"], end["reason"]) == ("TIMED_OUT", "exit code 143")


def test_the_log_says_that_a_job_elsewhere_has_to_end_and_could_not_be_told_yet(taken, pause, capfd):
    pause({"airflow.in_worker.POLL_S": 0.01})
    taken("silent", "runs", "runs", "ends", **LIMITS)
    said = capfd.readouterr().out
    assert said.count("its longest runtime is over; this task has 0.") == 2, "once more, as it was not told"
    assert said.count("its command cannot be told that it has to end, trying again: gpu-a does not") == 1


def test_a_job_elsewhere_that_was_told_ends_though_its_preemption_is_taken_back(taken, manager, pause):
    pause({"airflow.in_worker.POLL_S": 0.01})

    def begun():
        manager.submit("urgent", 2, 1, server="gpu-a", priority=9, expected_runtime=60)
        manager.preempt(manager.leases()[0]["task_id"], preemptor="urgent")

    def taken_back():
        manager.cancel("urgent")
        assert manager.leases()[0]["preempted_by"] is None

    launcher, _ = taken(taken_back, "ends", begun=begun, preemptible=True)
    assert len(launcher.told) == 2


def test_a_job_elsewhere_is_looked_at_every_second_in_its_grace_and_not_only_at_a_renewal(monkeypatch):
    waits: list[float | None] = []
    ends: queue.Queue[str] = queue.Queue()
    taken = {"gpu_failed": "", "preempted_by": "x", "reason": "", "preempt_grace_s": 600.0, "until": 600.0}
    answers = iter([{}, taken, taken])

    class Over(threading.Event):
        def wait(self, timeout=None):
            if threading.current_thread().name != "gpu-lease":
                return super().wait(timeout)
            waits.append(timeout)
            return False

    def renew(*_, **__):
        answer = next(answers, None)
        if answer is None:
            raise LeaseNotFoundError("t")
        return answer

    monkeypatch.setattr(in_worker, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
    service: Any = SimpleNamespace(renew=renew)
    with in_worker.kept_alive(service, "t", 1, 60.0, end=ends.put, tell=lambda lease: math.inf):
        assert ends.get(timeout=30) == LEASE_GONE
    assert waits == [15.0, 1.0, 1.0]
