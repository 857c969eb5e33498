"""Local launcher with real processes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import (
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    job_key,
    open_at,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from tests.eventually import processes_of_command, wait_for, wait_until_ended
from tests.small_disk import small_disk_at, take_all_files

SLEEP = f"sleep 61.{os.getpid()}"
"""Command that no other process of this machine runs."""
sleepers = partial(processes_of_command, SLEEP)


@pytest.fixture
def launcher(tmp_path):
    launcher = LocalLauncher(str(tmp_path))
    yield launcher
    for directory in filter(Path.is_dir, tmp_path.iterdir()):
        launcher.stop(directory.name, grace_s=0)


def test_a_job_sees_its_environment_and_leaves_log_and_exit_code(launcher):
    launcher.start(
        Job(
            "j",
            ("/bin/sh", "-c", "echo gpu $CUDA_VISIBLE_DEVICES; exit 3"),
            {"CUDA_VISIBLE_DEVICES": "9"},
            gpu_ids=(4,),
        )
    )
    assert wait_until_ended(launcher, "j") == JobStatus(JobState.FINISHED, 3)
    text, offset, *_ = launcher.logs("j")
    assert (text, offset) == ("gpu 4\n", 6)
    assert launcher.logs("j", offset)[:2] == ("", offset)


@pytest.mark.parametrize(("saves", "left"), [("", []), ("touch $GPU_JOB_DIR/saved;", ["gpu-j-0"])])
def test_the_own_directory_of_a_job_that_failed_stays_where_it_saved_something(
    launcher, tmp_path, saves, left
):
    """A lease's id has that of its run: nothing would go on from an empty one, and nothing remove it."""
    launcher.start(Job("gpu-j-0-1", ("/bin/sh", "-c", f"{saves} exit 3")))
    wait_until_ended(launcher, "gpu-j-0-1")
    launcher.stop("gpu-j-0-1")
    assert [directory.name for directory in (tmp_path / "kept").iterdir()] == left


def test_a_job_keeps_its_own_directory_while_an_earlier_one_of_its_lease_is_removed(launcher, tmp_path):
    launcher.start(Job("gpu-j-0-1", ("false",)))
    wait_until_ended(launcher, "gpu-j-0-1")
    launcher.start(Job("gpu-j-0-2", ("sleep", "60")))
    launcher.stop("gpu-j-0-1")
    assert (tmp_path / "kept" / "gpu-j-0").exists()


SECRETS = (
    "AIRFLOW__CORE__FERNET_KEY",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN",
    "AIRFLOW_CONN_GPU_MANAGER_DEFAULT",
    "AIRFLOW_VAR_PASSWORD",
    "_AIRFLOW_WWW_USER_PASSWORD",
    "GPU_MANAGER_STORE",
    "GPU_MANAGER_TOKEN",
    "GPU_MANAGER_AGENT_TOKEN",
    "GPU_MANAGER_JOB_KEYS",
)
"""Variables of worker, triggerer or agent with which a job could become them."""


@pytest.mark.parametrize("confine", ["off", "try"])
def test_a_job_inherits_what_its_programs_need_and_no_secrets(tmp_path, monkeypatch, confine):
    launcher = LocalLauncher(str(tmp_path))
    for name in (*SECRETS, "AIRFLOW_HOME", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "inherited")
    job = Job("j", ("/usr/bin/env",), {"GPU_MANAGER_URL": "its own"}, confine=confine)
    launcher.prepare(job)
    launcher.start(job)
    wait_until_ended(launcher, "j")
    lines = launcher.logs("j").text.splitlines()
    assert {"AIRFLOW_HOME=inherited", "HTTPS_PROXY=inherited", "GPU_MANAGER_URL=its own"} <= {*lines}
    assert not [line for line in lines if line.startswith(SECRETS)]


def test_a_second_start_has_no_effect_while_the_job_runs_or_after(launcher, tmp_path):
    count = tmp_path / "j" / "count"
    job = Job("j", ("/bin/sh", "-c", f"echo x >> {count}; sleep 0.3"))
    for _ in range(3):
        launcher.start(job)
    assert wait_until_ended(launcher, "j").exit_code == 0
    launcher.start(job)
    assert count.read_text() == "x\n"


def test_concurrent_starts_run_the_command_once(launcher, tmp_path):
    count = tmp_path / "j" / "count"
    job = Job("j", ("/bin/sh", "-c", f"echo x >> {count}; {SLEEP}"))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: launcher.status("j") if number % 2 else launcher.start(job), range(16)))
    assert launcher.status("j").state is JobState.RUNNING
    wait_for(lambda: count.exists() and count.read_text())
    assert count.read_text() == "x\n"


def test_stop_ends_processes_that_ignore_sigterm_and_left_the_group(launcher, tmp_path):
    launcher.start(Job("j", ("/bin/sh", "-c", f"trap '' TERM; setsid {SLEEP} & {SLEEP}")))
    wait_for(lambda: len(sleepers()) == 2)
    launcher.stop("j", grace_s=0.2)
    assert sleepers() == []
    assert launcher.status("j") == JobStatus(JobState.ABSENT)
    launcher.stop("j")


def test_stop_ends_processes_that_ignore_sigterm_and_closed_the_lock(launcher):
    """Python's subprocesses close inherited descriptors, as workers of training launchers do."""
    start = f"import subprocess; subprocess.Popen(['/bin/sh', '-c', 'trap \"\" TERM; {SLEEP}']).wait()"
    launcher.start(Job("j", (sys.executable, "-c", start)))
    wait_for(lambda: len(sleepers()) == 1)
    launcher.stop("j", grace_s=1)
    assert sleepers() == []


def test_a_job_whose_folder_was_removed_is_not_started_again_and_is_ended_by_stop(launcher, tmp_path):
    key = job_key("j", 1)
    job = Job(key, ("/bin/sh", "-c", f"{SLEEP}; true"))
    launcher.prepare(job)
    launcher.start(job)
    wait_for(lambda: len(sleepers()) == 1)
    shutil.rmtree(tmp_path / key)
    assert (launcher.status(key).state, launcher.running()) == (JobState.RUNNING, [key])
    with pytest.raises(LauncherError, match="of an earlier lease of this task still runs"):
        launcher.prepare(Job(job_key("j", 2), ("true",)))
    with pytest.raises(LauncherUnreachableError, match=r"job .* runs, but .* was removed: stop it"):
        launcher.start(job)
    assert len(sleepers()) == 1
    assert launcher.status(key).state is JobState.RUNNING, "with its directory made again"
    assert launcher.stop(key, grace_s=0), "it ran until then"
    assert (sleepers(), launcher.running()) == ([], [])


def test_a_job_whose_folder_was_removed_is_over_once_it_has_ended_and_not_started_again(launcher, tmp_path):
    begun, job = tmp_path / "runs", Job("j", ("/bin/sh", "-c", f"echo ran >> {tmp_path / 'runs'}; {SLEEP}"))
    launcher.start(job)
    wait_for(lambda: len(sleepers()) == 1)
    shutil.rmtree(tmp_path / "j")
    for process in sleepers():
        process.parent().kill()
        process.kill()
    wait_for(lambda: launcher.status("j").state is JobState.FINISHED)
    assert launcher.status("j").exit_code is None
    assert launcher.start(job) is False
    assert begun.read_text() == "ran\n"
    assert launcher.stop("j", grace_s=0) is False
    assert launcher.status("j").state is JobState.ABSENT


def test_a_job_has_its_grace_period_to_write_a_checkpoint(launcher, tmp_path):
    """SIGTERM is sent once: a second one would raise SystemExit while the job writes its checkpoint."""
    saved = tmp_path.with_name(f"{tmp_path.name}-saved")
    program = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
        "print('ready', flush=True)\n"
        "try: time.sleep(60)\n"
        f"finally: time.sleep(1); pathlib.Path({str(saved)!r}).touch()\n"
    )
    launcher.start(Job("j", (sys.executable, "-c", program)))
    wait_for(lambda: launcher.logs("j")[0])
    launcher.stop("j", grace_s=20)
    assert saved.exists()


def test_a_job_is_not_started_if_its_group_file_cannot_be_written(launcher, tmp_path):
    """Without the file `group`, as on a full disk, the next start would start the job again."""
    count = tmp_path / "j" / "count"
    (tmp_path / "j" / "group.new").mkdir(parents=True)
    job = Job("j", ("/bin/sh", "-c", f"echo x >> {count}"))
    with pytest.raises(
        LauncherError, match=r"^job j could not be started on .*/j cannot be written: .*group\.new"
    ):
        launcher.start(job)
    (tmp_path / "j" / "group.new").rmdir()
    launcher.start(job)
    wait_until_ended(launcher, "j")
    assert count.read_text() == "x\n"


def test_a_job_on_a_full_disk_is_told_once_and_ended_when_its_grace_is_over(small_disk):
    launcher = LocalLauncher(str(small_disk))
    told, ready = small_disk.parent / "told", small_disk.parent / "ready"
    trapped = f"trap 'echo x >> {told}' TERM; touch {ready}; while :; do sleep 0.02; done"
    launcher.start(Job("j", ("/bin/sh", "-c", trapped)))
    wait_for(ready.exists)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"x" * 2**22)
    for _ in range(3):
        assert launcher.preempt("j", 1.5).state is JobState.RUNNING
    wait_for(told.exists)
    assert launcher.preempt("j", 60.0, wait_s=30.0) == JobStatus(JobState.FINISHED, None, preempted=True)
    assert told.read_text() == "x\n"


def test_a_job_that_has_left_no_file_to_be_made_is_told_that_it_is_preempted(tmp_path):
    with small_disk_at(tmp_path / "small", "size=1m,nr_inodes=64") as small_disk:
        launcher, ready = LocalLauncher(str(small_disk)), tmp_path / "ready"
        trapped = f"trap 'sleep 0.3; echo told; exit 5' TERM; touch {ready}; while :; do sleep 0.02; done"
        launcher.prepare(job := Job("j", ("/bin/sh", "-c", trapped)))
        launcher.start(job)
        wait_for(ready.exists)
        with pytest.raises(OSError, match="No space left"):
            take_all_files(small_disk)
        ended = launcher.preempt("j", 60.0, wait_s=30.0)
        assert (ended.exit_code, ended.preempted) == (5, True)
        assert launcher.logs("j").text.count("told") == 1


def test_the_exit_code_of_a_job_that_filled_the_disk_is_known(small_disk):
    launcher = LocalLauncher(str(small_disk))
    fill = f"dd if=/dev/zero of={small_disk}/filler bs=4096; echo x > {small_disk}/more || exit 3"
    launcher.start(Job("j", ("/bin/sh", "-c", fill)))
    assert wait_until_ended(launcher, "j").exit_code == 3


def test_a_preempted_job_is_sent_its_signal_once_and_killed_when_its_grace_is_over(launcher, monkeypatch):
    """A SIGTERM just before SIGKILL would begin a second checkpoint that nobody lets end."""
    sent, killpg = [], os.killpg

    def noting(group, number):
        sent.append(number)
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", noting)
    launcher.start(
        Job("j", ("/bin/sh", "-c", "trap 'echo told' TERM; echo ready; while :; do sleep 0.02; done"))
    )
    wait_for(lambda: "ready" in launcher.logs("j").text)
    assert launcher.preempt("j", 0.3, wait_s=30.0).preempted
    assert sent[0] == signal.SIGTERM
    assert set(sent[1:]) == {signal.SIGKILL}
    assert launcher.logs("j").text.count("told") == 1


def test_a_job_whose_every_process_was_killed_is_finished_without_an_exit_code(launcher, tmp_path):
    launcher.start(Job("j", ("/bin/sh", "-c", f"{SLEEP}; true")))
    wait_for(lambda: len(sleepers()) == 1)
    os.killpg(int((tmp_path / "j" / "group").read_text()), 9)
    assert wait_until_ended(launcher, "j") == JobStatus(JobState.FINISHED, None)


def test_a_job_is_running_while_one_of_its_processes_is(launcher, tmp_path):
    launcher.start(Job("j", ("/bin/sh", "-c", f"{SLEEP}; true")))
    wait_for(lambda: len(sleepers()) == 1)
    command = sleepers()[0].parent()
    command.parent().kill()  # the shell that would write the exit code
    command.kill()
    assert launcher.status("j").state is JobState.RUNNING
    sleepers()[0].kill()
    assert wait_until_ended(launcher, "j") == JobStatus(JobState.FINISHED, None)


def test_without_a_thread_for_the_look_the_state_is_unknown(launcher):
    threading.stack_size(2**46)  # which no memory has
    try:
        with pytest.raises(LauncherUnreachableError, match=r"cannot be seen on .*can't start new thread"):
            launcher.status("j")
    finally:
        threading.stack_size(0)


def test_a_job_outlives_the_process_that_started_it(launcher, tmp_path):
    program = (
        "import os, signal; from resource_manager.jobs.launchers import Job;"
        "from resource_manager.jobs.launchers.local import LocalLauncher;"
        f"LocalLauncher({str(tmp_path)!r}).start(Job('j', ('/bin/sh', '-c', 'sleep 0.5; echo done')));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], start_new_session=True).returncode == -9
    assert wait_until_ended(launcher, "j").exit_code == 0
    assert launcher.logs("j")[0] == "done\n"


def test_a_missing_command_is_named_in_the_log(launcher):
    launcher.start(Job("j", ("no-such-command",)))
    assert wait_until_ended(launcher, "j").exit_code == 127
    assert "no-such-command" in launcher.logs("j")[0]


def test_the_log_is_returned_in_whole_lines(launcher):
    launcher.start(Job("j", (sys.executable, "-c", "print(('x' * 99 + '\\n') * 6000)")))
    wait_until_ended(launcher, "j")
    offset, lines = 0, []
    while True:
        text, following, *_ = launcher.logs("j", offset)
        if following == offset:
            break
        lines += text.splitlines()
        offset = following
    assert lines == ["x" * 99] * 6000 + [""]


def test_unknown_jobs_are_absent_and_unknown_launchers_and_images_are_refused():
    assert LocalLauncher("/nonexistent").status("j") == JobStatus(JobState.ABSENT)
    assert LocalLauncher("/nonexistent").logs("j", 5)[:2] == ("", 5)
    with pytest.raises(LauncherError, match="unknown launcher 'cloud'; known are"):
        open_at(JobPlace("cloud"))
    with pytest.raises(LauncherError, match="runs no images"):
        LocalLauncher("/nonexistent").start(Job("j", ("true",), image="x"))


def test_job_keys_are_safe_names_unique_by_lease():
    key = job_key("dag/manual__2026-01-01T00:00:00+00:00/train[3]", 7)
    assert all(letter.isalnum() or letter in "-_." for letter in key)
    assert len({key, job_key("dag/manual__2026-01-01T00:00:00+00:00/train[3]", 8), job_key("dag/x", 7)}) == 3
    assert len(job_key("é" * 500, 1)) < 100


def test_concurrent_stops_of_a_job_that_ignores_sigterm_succeed(launcher):
    launcher.start(Job("j", ("/bin/sh", "-c", f"trap '' TERM; {SLEEP}")))
    wait_for(lambda: len(sleepers()) == 1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: launcher.stop("j", grace_s=0.2), range(4)))
    assert sleepers() == []
    assert launcher.status("j") == JobStatus(JobState.ABSENT)
