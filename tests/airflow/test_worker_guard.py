"""Guard of a worker: what a task has started ends with the task's process, however that ends."""

import os
import signal
import subprocess
import sys
from itertools import count
from multiprocessing import get_context
from time import sleep
from typing import Any

import psutil
import pytest

from resource_manager.airflow.worker_guard import guarded, tell_this_process
from resource_manager.jobs.registered_process import register_process
from tests.eventually import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc")

TOKENS = count(100)
"""Each test has a lease of its own: a guard goes on for a second."""


def work(report, token):
    """Start a program in a session of its own and a process that is no program, and tell their ids."""
    os.environ.update(GPU_LEASE_ID="test:d/r/t", GPU_LEASE_FENCING_TOKEN=str(token))
    register_process("test:d/r/t", token)
    with guarded("test:d/r/t", token):
        program = subprocess.Popen(["sleep", "60"], start_new_session=True)
        other = subprocess.Popen(["sleep", "60"], env={**os.environ, "GPU_LEASE_FENCING_TOKEN": "8"})
        fork = os.fork()
        if fork == 0:
            sleep(60)
        report.send((program.pid, fork, other.pid))
        report.recv()
    report.send("ended")
    report.recv()


@pytest.fixture
def task():
    """Process of a task, and what it told."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=work, args=(there, next(TOKENS)))
    process.start()
    pids = here.recv()
    yield process, here, pids
    for pid in (*pids, process.pid):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.join()


def is_over(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_task_leaves_nothing_of_its_lease_and_all_of_others(task):
    process, _, (program, fork, other) = task
    process.kill()
    wait_for(lambda: is_over(program) and is_over(fork))
    assert not is_over(other)


def test_a_task_that_ends_by_itself_has_no_guard_any_more(task):
    process, here, (program, _, _) = task
    here.send("end")
    assert here.recv() == "ended"
    words = [child.cmdline() for child in psutil.Process(process.pid).children()]
    assert not any("guard(" in " ".join(line) for line in words)
    assert not is_over(program)


@pytest.mark.parametrize(("own", "signals"), [(None, [signal.SIGTERM]), (lambda *_: None, [signal.SIGUSR2])])
def test_a_worker_is_told_by_a_signal_that_leaves_it_its_grace(monkeypatch, own, signals):
    """Airflow has a handler for SIGTERM alone: by default SIGUSR2 would kill the worker at once."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    taken: Any = {"preempt_signal": "USR2", "preempt_grace_s": 60.0, "until": 60.0}
    before = signal.signal(signal.SIGUSR2, own or signal.SIG_DFL)
    try:
        assert tell_this_process(taken) == 30.0
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert sent == signals
