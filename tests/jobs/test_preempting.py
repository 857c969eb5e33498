"""Jobs of preempted leases on the real local launcher: told once, ended in time, and continued later."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.teams import Team, Teams
from resource_manager.jobs.gang_job import GangJob, Preempted
from resource_manager.jobs.job_preemption import STEP_S, grace_of, queue_again
from resource_manager.jobs.launchers import Job, JobState
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.manager.results import Allocation
from resource_manager.scheduling.preemption.requeueing import restarts_of
from tests.builders import redefine
from tests.eventually import wait_for
from tests.jobs.gangs import place

TRAINING = """
import json, os, pathlib, signal, sys, time
saved = pathlib.Path(os.environ["GPU_CHECKPOINT_FILE"])
step = json.loads(saved.read_text()) if saved.exists() else 0
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append("TERM"))
signal.signal(signal.SIGUSR2, lambda *_: signals.append("USR2"))
print("from", step, "restart", os.environ["GPU_RESTART_COUNT"], flush=True)
while step < int(sys.argv[1]):
    step += 1
    print("step", step, flush=True)
    if signals:  # between two steps, so that none is counted and not printed
        saved.with_suffix(".new").write_text(json.dumps(step))
        saved.with_suffix(".new").replace(saved)
        sys.exit(3)
    time.sleep(0.01)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUResourceManager]:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    with GPUResourceManager.from_url("memory://", min_gpus=1) as manager:
        redefine(manager, teams=Teams((Team("vision", 32),), True, 0.0, 0.0))
        yield manager


def train(manager: GPUResourceManager, grace_s: float = 30.0, signal_name: str = "TERM") -> Allocation:
    """Return the lease of the job `x` on all GPUs of a server."""
    found = manager.submit(
        "x",
        8,
        team="nlp",
        server="gpu-server-0",
        preempt_grace=grace_s,
        preempt_signal=signal_name,
    )
    assert found["state"] == "RUNNING"
    return place(manager, found)


def start(allocation: Allocation, program: str, *arguments: str) -> GangJob:
    gang = GangJob.of(allocation)
    assert gang is not None
    restarts = {"GPU_RESTART_COUNT": str(restarts_of(allocation["labels"]))}
    command = (sys.executable, "-c", program, *arguments)
    gang.start([Job(gang.jobs[0].key, command, restarts)])
    return gang


def preempt(manager: GPUResourceManager, number: int = 0) -> Allocation:
    """Let a stronger request take the lease of `x`; return the lease as it is then."""
    manager.submit(f"stronger-{number}", 8, team="vision", server="gpu-server-0")
    (found,) = manager.preempting()
    assert found["state"] == "PREEMPTING"
    return found


def ended(taken: Allocation, gang: GangJob) -> Preempted:
    """Tell the jobs step by step that their lease is taken, as trigger and reconciler do, until they end."""
    grace_s = grace_of(taken)
    while not (done := gang.preempt(grace_s, taken["preempt_signal"], min(grace_s, STEP_S))).is_over:
        assert not done.left
    return done


def output(gang: GangJob) -> str:
    return LocalLauncher().logs(gang.jobs[0].key)[0]


def has_stepped(gang: GangJob) -> bool:
    return output(gang).count("step") >= 3


@pytest.mark.parametrize("signal_name", ["TERM", "USR2"])
def test_ten_preemptions_lose_no_step(manager: GPUResourceManager, signal_name: str) -> None:
    steps: list[int] = []
    for number in range(10):
        allocation = train(manager, signal_name=signal_name)
        assert restarts_of(allocation["labels"]) == number
        gang = start(allocation, TRAINING, "100000")
        wait_for(partial(has_stepped, gang))
        taken = preempt(manager, number)
        done = ended(taken, gang)
        assert [status.exit_code for status in done.statuses.values()] == [3]
        assert not done.has_failed
        steps += [int(line.split()[1]) for line in output(gang).splitlines() if line.startswith("step")]
        assert queue_again(manager, taken, gang)
        assert manager.status_of("x")["state"] == "WAITING"  # type: ignore[index]
        manager.release(f"stronger-{number}")
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 30
    kept = LocalLauncher().root
    gang = start(train(manager), TRAINING, str(len(steps) + 1))
    wait_for(lambda: LocalLauncher().status(gang.jobs[0].key).state is JobState.FINISHED)
    assert f"from {len(steps)} restart 10" in output(gang)
    gang.stop()
    assert not list(Path(kept, "kept").iterdir())  # it has succeeded, so nothing has to go on from there


def test_a_job_that_ignores_the_signal_is_killed_after_its_grace(manager: GPUResourceManager) -> None:
    gang = start(train(manager, grace_s=0.5), STUBBORN)
    wait_for(lambda: "up" in output(gang))
    taken = preempt(manager)
    done = ended(taken, gang)
    assert taken["until"] is not None
    assert time.time() >= taken["until"]
    (status,) = done.statuses.values()
    assert (status.state, status.exit_code, status.preempted) == (JobState.FINISHED, None, True)
    assert queue_again(manager, taken, gang)
    assert manager.status_of("stronger-0")["state"] == "RUNNING"  # type: ignore[index]


def test_the_signal_is_sent_once_and_the_grace_counts_from_then(manager: GPUResourceManager) -> None:
    counting = (
        "import os, signal, time\ncount = 0\n"
        "def told(*_):\n    global count\n    count += 1\n    print('told', count, flush=True)\n"
        "signal.signal(signal.SIGTERM, told)\nprint('up', flush=True)\n"
        "while True:\n    time.sleep(0.05)\n"
        "    if os.path.exists(os.environ['GPU_PREEMPT_FILE']): print('file', flush=True)\n"
    )
    gang = start(train(manager), counting)
    wait_for(lambda: "up" in output(gang))
    for _ in range(3):  # as from three processes, two of which were killed
        assert not gang.preempt(60.0, "TERM", 0.0).is_over
    wait_for(lambda: {"file", "told 1"} <= set(output(gang).splitlines()))
    assert output(gang).count("told") == 1
    assert not gang.preempt(0.01, "TERM", 0.1).is_over  # a later call takes nothing of what it was given
    gang.stop(0.0)


@pytest.mark.parametrize(
    ("told_after_s", "expected_s"), [(0.0, 60.0), (5.0, 55.0), (50.0, 30.0), (-9.0, 60.0)]
)
def test_the_grace_ends_with_the_preemption_but_is_never_less_than_half(
    set_wall_clock: Any, told_after_s: float, expected_s: float
) -> None:
    set_wall_clock(lambda _: 1000.0 + told_after_s)
    assert grace_of({"preempt_grace_s": 60.0, "until": 1060.0}) == expected_s


def test_a_job_finds_its_grace_in_the_file_it_is_told_by(manager: GPUResourceManager) -> None:
    reading = (
        "import os, signal, time\n"
        "def told(*_):\n    print('has', open(os.environ['GPU_PREEMPT_FILE']).read(), flush=True)\n"
        "signal.signal(signal.SIGTERM, told)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    gang = start(train(manager), reading)
    wait_for(lambda: "up" in output(gang))
    gang.preempt(7.5, "TERM", 0.0)
    wait_for(lambda: "has 7.5" in output(gang))
    gang.stop(0.0)


@pytest.mark.parametrize("signal_name", ["TERM", "USR2"])
def test_a_command_in_an_operators_session_saves_what_it_did_on_either_signal(
    manager: GPUResourceManager, tmp_path: Path, signal_name: str
) -> None:
    """The process that waits for it gets the same signal, and its exit code is the command's."""
    launcher, job = LocalLauncher(), Job("j", ())
    launcher.prepare(job)
    saves = f"""trap 'cp "$GPU_PREEMPT_FILE" {tmp_path}/saved; exit 7' {signal_name}; echo up"""
    command = f"{saves}; while :; do sleep 0.05; done"
    program = "import sys; from resource_manager.jobs.directories.attending import run; "
    program += "raise SystemExit(run(*sys.argv[1:], {}))"
    call = [sys.executable, "-c", program, launcher.root, job.key, command]
    with subprocess.Popen(call, stdout=subprocess.PIPE, start_new_session=True, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "up\n"
        status = launcher.preempt(job.key, 30.0, signal_name, STEP_S)
        assert (status.state, status.exit_code, session.wait(30)) == (JobState.FINISHED, 7, 7)
    assert (tmp_path / "saved").read_text() == "30\n"


def test_a_job_that_ends_well_in_its_grace_has_succeeded(manager: GPUResourceManager) -> None:
    quick = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    gang = start(train(manager), quick)
    wait_for(lambda: "up" in output(gang))
    assert ended(preempt(manager), gang).has_succeeded


def test_a_job_that_had_failed_before_it_was_told_has_failed(manager: GPUResourceManager) -> None:
    gang = start(train(manager), "raise SystemExit(7)")
    wait_for(lambda: LocalLauncher().status(gang.jobs[0].key).state is JobState.FINISHED)
    done = ended(preempt(manager), gang)
    assert done.has_failed
    assert not done.has_succeeded


def test_a_second_process_finds_nothing_left_to_do(manager: GPUResourceManager) -> None:
    gang = start(train(manager), TRAINING, "100000")
    wait_for(lambda: "step" in output(gang))
    taken = preempt(manager)
    ended(taken, gang)
    gang.stop()  # the first process is killed here, before the release
    assert ended(taken, gang).is_over
    assert queue_again(manager, taken, gang)
    assert not queue_again(manager, taken, gang)
    assert restarts_of(manager.status_of("x")["labels"]) == 1  # type: ignore[index]


def test_the_checkpoint_of_a_job_decides_what_its_preemption_loses(manager: GPUResourceManager) -> None:
    program = (
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['GPU_CHECKPOINT_FILE']).write_text('1')\nprint('saved', flush=True)\n"
        "time.sleep(600)"
    )
    allocation = train(manager)
    gang = start(allocation, program)
    wait_for(lambda: "saved" in output(gang))
    saved_at = LocalLauncher().status(gang.jobs[0].key).checkpoint_at
    assert saved_at is not None
    renewed = manager.renew("x", checkpoint_at=saved_at)
    assert renewed["checkpoint_at"] == saved_at
    assert json.loads(json.dumps(renewed))["until"] is None
    gang.stop()
