"""A job that was stopped stays ended: a start that comes late, or goes on late, starts nothing."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta

import psutil
import pytest

from resource_manager.jobs.directories import ending
from resource_manager.jobs.launchers import (
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherUnreachableError,
    docker,
    job_key,
    open_at,
)
from resource_manager.jobs.launchers.fake import FakeLauncher
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.launchers.server_library import library_of
from tests.eventually import wait_for, wait_until_ended
from tests.small_disk import small_disk_at, take_all_files

# Docker's SDK leaves its pools, and sockets to engines that do not answer, to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DAY_S = 86400


def refuses(launcher, job):
    """Return whether the launcher says that the job has ended, and neither prepares nor starts it."""
    for call in (launcher.prepare, launcher.start):
        with pytest.raises(AlreadyEndedError, match=f"^job {job.key} has ended already; it is not started"):
            call(job)
    return launcher.status(job.key) == JobStatus(JobState.ABSENT)


def test_a_stopped_job_is_not_started_again(launcher, job):
    wanted = job("sleep 60")
    launcher.prepare(wanted)
    launcher.start(wanted)
    launcher.stop(wanted.key, 0.0)
    assert refuses(launcher, wanted)


def test_a_job_that_was_stopped_before_its_start_is_not_started(launcher, job):
    wanted, prepared = job("sleep 60"), job("sleep 60")
    launcher.stop(wanted.key)
    assert refuses(launcher, wanted)
    launcher.prepare(prepared)
    launcher.stop(prepared.key)
    assert refuses(launcher, prepared)


def test_a_fake_job_that_was_stopped_is_not_started_again():
    launcher, job = FakeLauncher(), Job("j", ("true",), labels={"launcher": "local"})
    assert launcher.prepare(job).launcher == "local"
    launcher.stop("j")
    assert refuses(launcher, job)
    assert launcher.jobs == []


@pytest.fixture
def answer(launcher, monkeypatch):
    """Return answer(name=function): the function answers that call of the launcher to the Docker engine."""

    def by(**functions):
        for name, function in functions.items():
            monkeypatch.setattr(launcher._engine.api, name, function)

    return by


@pytest.fixture
def impatient(monkeypatch):
    """A container whose start was begun by another is soon taken for left."""
    monkeypatch.setattr(docker, "STARTER_TIMEOUT_S", 0.3)


def test_a_day_later_nothing_is_left_of_a_stopped_job(launcher, job, answer, monkeypatch):
    stopped, recent = job("true"), job("true")
    launcher.stop(stopped.key)
    launcher.stop(recent.key)
    if isinstance(launcher, docker.DockerLauncher):
        make_later(launcher, answer, stopped)
    else:
        tombstone = os.path.join(launcher.root, "ended", stopped.key)
        os.utime(tombstone, (time.time() - DAY_S - 60,) * 2)
        assert refuses(launcher, recent)
    launcher.prepare(stopped)
    launcher.start(stopped)
    assert wait_until_ended(launcher, stopped.key).exit_code == 0
    monkeypatch.undo()


def make_later(launcher, answer, job):
    """Let the engine's clock be a day later, and its list of tombstones have that of this job only."""
    own = launcher._engine.api.volumes(filters={"name": job.key})
    engine = launcher._engine.api.info()
    later = datetime.fromisoformat(engine["SystemTime"]) + timedelta(days=1, seconds=60)
    answer(info=lambda: {**engine, "SystemTime": later.isoformat()}, volumes=lambda filters: own)


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
def test_a_job_is_stopped_while_two_processes_remove_an_old_tombstone(launcher, job, answer, monkeypatch):
    old, running = job("true"), job("sleep 60")
    launcher.stop(old.key)
    launcher.prepare(running)
    launcher.start(running)
    make_later(launcher, answer, old)
    launcher._engine.api.remove_volume(f"{old.key}-ended")
    launcher.stop(running.key, 0.0)
    monkeypatch.undo()
    assert refuses(launcher, running)


@pytest.mark.parametrize("launcher", ["local", pytest.param("docker", marks=pytest.mark.e2e)], indirect=True)
def test_while_a_job_is_being_ended_a_start_does_not_say_that_it_is_gone(launcher, job, monkeypatch):
    wanted = job("sleep 60")
    launcher.prepare(wanted)
    launcher.start(wanted)
    with monkeypatch.context() as patched:
        patched.setattr(ending, "terminate", interrupt)
        if isinstance(launcher, docker.DockerLauncher):
            patched.setattr(launcher._engine.api, "stop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            launcher.stop(wanted.key)
    for call in (launcher.prepare, launcher.start):
        with pytest.raises(
            LauncherUnreachableError, match=f"^job {wanted.key} is being ended and still runs"
        ):
            call(wanted)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_what_a_later_lease_goes_on_from_stays_when_an_earlier_one_is_removed(launcher, job):
    """A stop that comes late, of a job that has succeeded."""
    made = job("")
    of_lease = [
        replace(made, key=job_key(made.key, token), command=("/bin/sh", "-c", command))
        for token, command in ((1, "true"), (2, "touch $GPU_JOB_DIR/saved; echo ready; sleep 60"))
    ]
    earlier, later = of_lease
    try:
        launcher.start(earlier)
        wait_until_ended(launcher, earlier.key)
        launcher.prepare(later)
        launcher.start(later)
        wait_for(lambda: "ready" in launcher.logs(later.key).text)
        launcher.stop(earlier.key)
        launcher.stop(later.key, 0.0)
        found = replace(later, key=job_key(made.key, 3), command=("/bin/sh", "-c", "ls $GPU_JOB_DIR"))
        of_lease.append(found)
        launcher.start(found)
        wait_until_ended(launcher, found.key)
        assert launcher.logs(found.key).text == "saved\n"
    finally:
        for each in of_lease:
            launcher.stop(each.key, 0.0)


@pytest.mark.parametrize(
    ("moment", "has_the_lock"),
    [
        ("os.makedirs", False),
        ("job_files.locked", False),
        ("starting.own_variables", True),
        ("subprocess.run", True),
    ],
)
def test_a_start_that_is_halted_at_any_moment_starts_nothing_after_stop(
    tmp_path, monkeypatch, moment, has_the_lock
):
    """It holds the lock from its look for a tombstone on: then `stop` cannot know yet that nothing starts."""
    root, ran = tmp_path / "jobs", tmp_path / "ran"
    call = {"root": str(root), "key": "j", "command": ["touch", str(ran)], "environment": {}}
    starter = halted_at(moment, f"start(**{call!r})")
    launcher = LocalLauncher(str(root))
    try:
        monkeypatch.setattr(ending, "KILL_TIMEOUT_S", 0.3)
        if has_the_lock:
            with pytest.raises(LauncherUnreachableError, match="job j could not be stopped on"):
                launcher.stop("j", 0.0)
        else:
            launcher.stop("j", 0.0)
        starter.send_signal(signal.SIGCONT)
        assert "AlreadyEndedError: job j has ended already" in starter.communicate(timeout=60)[1]
    finally:
        starter.kill()
        starter.communicate()
    assert launcher.status("j") == JobStatus(JobState.ABSENT)
    launcher.stop("j", 0.0)
    assert not (root / "j").exists()
    assert not ran.exists()


def halted_at(moment, call):
    """Return a process that makes this call of the library, halted by SIGSTOP at its first `moment`."""
    program = (
        f"{library_of()}from resource_manager.jobs.directories import job_files, starting\n"
        "def halting(act):\n"
        "    halts = [None]\n"
        "    def acting(*given, **more):\n"
        "        if halts: halts.pop(); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "        return act(*given, **more)\n"
        "    return acting\n"
        f"{moment} = halting({moment})\n"
        f"{call}\n"
    )
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    return process


def test_stop_ends_no_process_that_only_looks_at_the_job(tmp_path):
    launcher = LocalLauncher(str(tmp_path))
    launcher.start(Job("j", ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")))
    onlooker = halted_at("fcntl.flock", f"print(status({str(tmp_path)!r}, 'j'))")
    try:
        launcher.stop("j", 0.0)
        assert psutil.Process(onlooker.pid).status() == psutil.STATUS_STOPPED
        onlooker.send_signal(signal.SIGCONT)
        assert onlooker.wait(60) == 0
    finally:
        onlooker.kill()
        onlooker.communicate()


def test_a_job_on_a_disk_without_room_for_a_tombstone_is_stopped_and_not_started_again(tmp_path):
    with small_disk_at(tmp_path / "small", "size=1m,nr_inodes=64") as small_disk:
        launcher, job = LocalLauncher(str(small_disk)), Job("j", ("sleep", "60"))
        launcher.prepare(job)
        launcher.start(job)
        with pytest.raises(OSError, match="No space left"):
            take_all_files(small_disk)
        launcher.stop("j", 0.0)
        assert refuses(launcher, job)


def test_a_job_on_a_disk_that_became_read_only_is_seen_and_ended(small_disk, tmp_path):
    LocalLauncher(str(small_disk)).start(Job("j", ("sleep", "60")))
    (tmp_path / "read only").mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(tmp_path / "read only")], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path / "read only")], check=True)
        launcher = LocalLauncher(str(tmp_path / "read only"))
        assert launcher.status("j").state is JobState.RUNNING
        with pytest.raises(LauncherUnreachableError, match="Read-only file system"):
            launcher.stop("j", 0.0)
        assert launcher.status("j") == JobStatus(JobState.FINISHED, None)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "read only")], check=True)


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
@pytest.mark.parametrize("moment", ["create_container", "inspect_volume", "put_archive", "start"])
@pytest.mark.parametrize("is_left", [False, True], ids=["new", "left unstarted by another"])
def test_a_container_whose_start_is_halted_at_any_moment_does_not_start_after_stop(
    launcher, job, answer, impatient, monkeypatch, moment, is_left
):
    wanted = job("echo begun; sleep 60", files={"A": "text"})
    place = launcher.prepare(wanted)
    if is_left:
        with monkeypatch.context() as patched:
            patched.setattr(launcher._engine.api, "start", interrupt)
            with pytest.raises(KeyboardInterrupt):
                launcher.start(wanted)
    stop_before(launcher, moment, place, wanted, answer)
    with pytest.raises(AlreadyEndedError):
        launcher.start(wanted)
    left = launcher._engine.api.containers(all=True, filters={"name": wanted.key})
    assert left == []


def stop_before(launcher, moment, place, job, answer):
    """Let another process stop the job before the launcher's next call of this kind."""
    act = getattr(launcher._engine.api, moment)

    def acting(*given, **more):
        answer(**{moment: act})
        with closing(open_at(place)) as other:
            other.stop(job.key, 0.0)
        return act(*given, **more)

    answer(**{moment: acting})


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
def test_a_container_runs_once_though_its_first_starter_was_halted_until_another_had_run_it(
    launcher, job, answer, impatient
):
    wanted = job("echo begun")
    place = launcher.prepare(wanted)
    start = launcher._engine.api.start

    def late(container):
        answer(start=start)
        with closing(open_at(place)) as other:
            other.start(wanted)
            wait_until_ended(other, wanted.key)
        start(container)

    answer(start=late)
    launcher.start(wanted)
    assert launcher.status(wanted.key) == JobStatus(JobState.FINISHED, 0)
    assert launcher.logs(wanted.key).text == "begun\n"
