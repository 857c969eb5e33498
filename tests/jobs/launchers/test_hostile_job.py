"""A job may put anything in place of the files that its launcher reads: it hangs and deceives nobody."""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event

import pytest

from resource_manager.jobs.directories import calls, job_files
from resource_manager.jobs.launchers import (
    Job,
    JobState,
    LauncherUnreachableError,
    directory_launcher,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from tests.eventually import wait_for, wait_until_ended


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(str(path))


def as_garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 100_000)


def as_folder(path: Path) -> None:
    path.mkdir()


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher(str(tmp_path))


def sleeping(launcher: LocalLauncher, tmp_path: Path, script: str = "") -> Path:
    """Start a job that ignores SIGTERM; return its folder."""
    program = f"trap '' TERM; {script} echo up; while :; do sleep 0.05; done"
    job = Job("j", ("/bin/sh", "-c", program))
    launcher.prepare(job)
    launcher.start(job)
    wait_for(lambda: "up" in (tmp_path / "j" / "log").read_text())
    return tmp_path / "j"


@pytest.mark.parametrize("grace", ["1e9", "nan", "inf", "-1", "rubbish", ""])
def test_a_job_that_writes_its_own_grace_is_killed_when_that_of_its_lease_is_over(
    launcher: LocalLauncher, tmp_path: Path, grace: str
) -> None:
    sleeping(launcher, tmp_path, f"echo '{grace}' > $GPU_PREEMPT_FILE;")
    assert not launcher.status("j").preempted
    ended = launcher.preempt("j", 0.3, wait_s=30.0)
    assert (ended.state, ended.preempted) == (JobState.FINISHED, True)
    launcher.stop("j", 0.0)
    assert not [*(tmp_path / "told").iterdir()]


def test_a_job_that_wrote_the_file_before_is_told_all_the_same(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    program = (
        "import os, signal, sys, time\nopen(os.environ['GPU_PREEMPT_FILE'], 'w').write('1e9')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(open(os.environ['GPU_PREEMPT_FILE']).read())))"
        "\nprint('up', flush=True)\ntime.sleep(600)"
    )
    launcher.start(Job("j", (sys.executable, "-c", program)))
    wait_for(lambda: "up" in launcher.logs("j").text)
    assert launcher.preempt("j", 30, wait_s=30.0).exit_code == 30
    launcher.stop("j", 0.0)


@pytest.mark.parametrize("put", [as_pipe, as_link_to_a_device, as_socket, as_garbage, as_folder])
@pytest.mark.parametrize("name", ["exit_code", "log", "group", "preempted", "prepared", "sign"])
@pytest.mark.timeout(60)
def test_whatever_a_job_puts_in_place_of_a_file_no_call_hangs_and_it_can_be_stopped(
    launcher: LocalLauncher, tmp_path: Path, name: str, put: Callable[[Path], None]
) -> None:
    directory = sleeping(launcher, tmp_path)
    (directory / name).unlink(missing_ok=True)
    put(directory / name)
    for call in (launcher.status, launcher.logs, launcher.tail, lambda key: launcher.preempt(key, 0.0)):
        with suppress(LauncherUnreachableError):
            call("j")
    launcher.stop("j", 0.0)
    assert launcher.status("j").state is JobState.ABSENT


@pytest.mark.parametrize("group", ["0", "-1", "1"])
def test_a_job_that_writes_another_process_group_ends_nobody_else(
    launcher: LocalLauncher, tmp_path: Path, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = sleeping(launcher, tmp_path)
    own = (directory / "group").read_text()
    for wrong in (group, str(os.getpgrp())):
        (directory / "group").write_text(wrong)
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda *sent: pytest.fail(f"signalled {sent}"))
            launcher.preempt("j", 60.0)
    (directory / "group").write_text(own)
    launcher.stop("j", 0.0)
    assert launcher.status("j").state is JobState.ABSENT


def test_a_job_that_forges_its_exit_code_is_told_by_its_end(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(Job("j", ("/bin/sh", "-c", "exit 3")))
    wait_until_ended(launcher, "j")
    (tmp_path / "j" / "exit_code").unlink()
    as_pipe(tmp_path / "j" / "exit_code")
    wait_for(lambda: launcher.status("j").state is JobState.FINISHED)
    assert launcher.status("j").exit_code is None
    launcher.stop("j", 0.0)


@pytest.mark.parametrize("key", ["../victim", "../../victim", "..", ".", "a/../../victim", "a\nb", "x" * 256])
def test_no_name_of_a_job_leads_out_of_the_folder(tmp_path: Path, key: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    launcher = LocalLauncher(str(tmp_path / "home" / "jobs"))
    launcher.prepare(Job("j", ("true",)))
    calls = (launcher.stop, launcher.terminate, launcher.status, launcher.logs, launcher.sign)
    for call in calls:
        with pytest.raises(LauncherUnreachableError, match="no job is called"):
            call(key)
    with pytest.raises(job_files.ElsewhereError):
        job_files.bury(str(tmp_path / "home" / "jobs"), key)
    assert victim.exists()
    assert (tmp_path / "home").exists()


@pytest.mark.parametrize("at", [-5.0, 1e13])
def test_the_date_of_a_checkpoint_is_a_time_or_nothing(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    """What is no time is refused by a service, with all else that is told in the same call."""
    launcher.start(Job("j", ("/bin/sh", "-c", "touch $GPU_CHECKPOINT_FILE")))
    wait_until_ended(launcher, "j")
    assert launcher.status("j").checkpoint_at
    found = os.stat
    dated = os.stat_result([*os.stat("/")[:7], at, at, at])
    monkeypatch.setattr(os, "stat", lambda path, *a, **k: dated if "checkpoint" in str(path) else found(path))
    assert launcher.status("j").checkpoint_at is None
    monkeypatch.undo()
    launcher.stop("j", 0.0)


def test_a_folder_that_hangs_is_out_of_reach(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Event()
    monkeypatch.setattr(directory_launcher, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setitem(calls.ACTS, "status", lambda *_, **__: answered.wait(60.0))
    with pytest.raises(LauncherUnreachableError, match=r"^job j cannot be seen on \S+: .* does not answer$"):
        launcher.status("j")
    answered.set()
