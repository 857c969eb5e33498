"""Processes without a mark of their job end with its group; those of others with its number do not."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from resource_manager.jobs.directories import ending, job_processes
from resource_manager.jobs.launchers import Job, JobState, LauncherUnreachableError
from resource_manager.jobs.launchers.local import LocalLauncher
from tests.eventually import processes_of_command, wait_for, wait_until_ended
from tests.jobs.launchers.test_terminal import attended_source

SLEEP = f"sleep 63.{os.getpid()}"
"""Command that no other process of this machine runs."""

LEAVES = shlex.join(
    [
        sys.executable,
        "-c",
        "import subprocess; subprocess.Popen(['/bin/sh', '-c', "
        f"'trap \"\" TERM; exec {SLEEP}'], env={{}}, stdout=subprocess.DEVNULL)",
    ]
)
"""Command that leaves a process with neither lock nor variables of the job, which ignores SIGTERM."""

IN_GROUPS = ["local", "agent", pytest.param("ssh", marks=pytest.mark.e2e)]


sleepers = partial(processes_of_command, SLEEP)


@pytest.mark.parametrize("launcher", IN_GROUPS, indirect=True)
@pytest.mark.parametrize("then", ["exit 0", "sleep 60"], ids=["it ends", "it is ended"])
def test_a_process_without_a_mark_of_the_job_does_not_outlive_its_stop(
    launcher: Any, job: Callable[[str], Job], then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending.terminate, "__defaults__", (0.3,))  # by which an agent ends what is left
    started = job(f"{LEAVES}; {then}")
    launcher.prepare(started)
    launcher.start(started)
    wait_for(sleepers)
    if then == "exit 0":
        wait_for((Path(launcher.root) / started.key / "exit_code").exists)
    launcher.stop(started.key, grace_s=0.3)
    assert sleepers() == []


def test_a_job_that_has_ended_is_listed_while_such_a_process_is_left(tmp_path: Path) -> None:
    launcher = LocalLauncher(str(tmp_path))
    launcher.prepare(job := Job("j", ("/bin/sh", "-c", LEAVES)))
    launcher.start(job)
    assert wait_until_ended(launcher, "j").exit_code == 0
    wait_for(sleepers)
    os.utime(tmp_path / "j" / "group", (time.time() - 60,) * 2)  # the job began a while ago
    assert launcher.running() == ["j"]
    assert launcher.preempt("j", 60.0).state is JobState.FINISHED
    assert sleepers() == []
    assert launcher.running() == []
    launcher.stop("j", 0.0)


def test_a_job_is_listed_while_a_process_that_left_its_group_has_its_mark(tmp_path: Path) -> None:
    launcher = LocalLauncher(str(tmp_path))
    leaves = f"import subprocess; subprocess.Popen({SLEEP.split()}, start_new_session=True)"
    launcher.prepare(job := Job("j", (sys.executable, "-c", leaves)))
    launcher.start(job)
    assert wait_until_ended(launcher, "j").exit_code == 0
    wait_for(lambda: sleepers() and not job_processes.has_group(str(tmp_path / "j")))
    assert launcher.running() == ["j"]
    launcher.stop("j", 0.0)
    assert sleepers() == []


def test_a_command_in_a_terminal_leaves_no_process_without_a_mark(tmp_path: Path) -> None:
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    attended = attended_source(tmp_path, f"{LEAVES}; {wait}", 0.0, "terminate.__defaults__ = (0.3,)")
    wait_for(sleepers)
    os.utime(tmp_path / "j" / "group", (time.time() - 60,) * 2)  # the job began a while ago
    (tmp_path / "go").touch()
    assert attended.wait(60) == 0
    assert sleepers() == []


def test_a_group_with_the_number_of_one_that_is_gone_is_another_s(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """Though a process of the job is left, which has its lock and another group."""
    launcher = LocalLauncher(str(tmp_path))
    launcher.prepare(job := Job("j", ("/bin/sh", "-c", f"setsid {SLEEP} &")))
    launcher.start(job)
    wait_until_ended(launcher, "j")
    wait_for(sleepers)
    (tmp_path / "j" / "group").write_text(str(bystander.pid))
    for name in ("group", "exit_code"):
        os.utime(tmp_path / "j" / name, (time.time() - 60,) * 2)  # the bystander began after that
    launcher.terminate("j", 1.0)
    assert sleepers() == []
    assert bystander.poll() is None
    assert launcher.running() == []
    launcher.stop("j", 0.0)
    assert bystander.poll() is None


def test_a_process_that_does_not_end_at_once_when_it_is_killed_is_still_the_job_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may keep it for a while, and the others of its group, which had the marks, are gone."""
    launcher, kill = LocalLauncher(str(tmp_path)), os.kill
    launcher.start(Job("j", ("/bin/sh", "-c", f"{LEAVES}; sleep 60")))
    wait_for(sleepers)
    [slow] = sleepers()
    os.utime(tmp_path / "j" / "group", (time.time() - 60,) * 2)  # the job began a while ago

    def killpg(group: int, number: int) -> None:
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.getpgid(process.pid) == group and process.pid != slow.pid and number:
                    kill(process.pid, number)

    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", killpg)
        patched.setattr(os, "kill", lambda process, number: process == slow.pid or kill(process, number))
        patched.setattr(ending, "KILL_TIMEOUT_S", 0.3)
        with pytest.raises(LauncherUnreachableError, match="the processes of job j survive SIGKILL"):
            launcher.stop("j", 0.0)
    assert not (tmp_path / "j" / "exit_code").exists()
    launcher.stop("j", 0.0)
    assert sleepers() == []


@pytest.mark.parametrize(
    "end", [partial(ending.preempt, grace_s=60.0, wait_s=60.0), ending.stop], ids=["preempt", "stop"]
)
def test_a_command_under_a_lease_returns_its_exit_code_though_what_is_left_of_it_is_ended(
    tmp_path: Path, end: Callable[[str, str], object]
) -> None:
    """Its program takes a while to end, as on a busy server, and Python gives up its handlers before."""
    LocalLauncher(str(tmp_path)).prepare(Job("j", ("/bin/true",)))
    program = f"""
import time
from resource_manager.jobs.directories import attending
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)
slow = Slow()
raise SystemExit(attending.run({str(tmp_path)!r}, "j", "exit 7", {{}}))
"""
    command = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    wait_for((tmp_path / "j" / "exit_code").exists)
    end(str(tmp_path), "j")
    assert command.wait(60) == 7
