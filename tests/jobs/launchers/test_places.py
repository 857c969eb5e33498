"""A job is looked for at the place where it was prepared; whoever cannot look there knows nothing of it."""

import ast
import os
import signal
import socket
import stat
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import ending, job_files, job_processes, starting
from resource_manager.jobs.launchers import (
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    open_at,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.launchers.slurm import LocalPython
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.jobs.launchers.ssh_python import SSHPython
from tests.eventually import wait_for, wait_until_ended
from tests.ssh_account import logged_in

# Docker's SDK leaves its pools, and sockets to engines that do not answer, to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def calls(launcher, job):
    """Return every call that has to look at the job's place."""
    key = job.key
    return [
        lambda: launcher.prepare(job),
        lambda: launcher.start(job),
        lambda: launcher.status(key),
        lambda: launcher.logs(key),
        lambda: launcher.tail(key),
        lambda: launcher.terminate(key, 0.0),
        lambda: launcher.preempt(key, 0.0),
        lambda: launcher.stop(key, 0.0),
    ]


def test_a_job_is_found_at_its_place_whatever_the_environment_of_who_asks(
    launcher, job, monkeypatch, tmp_path
):
    wanted = job("echo begun; sleep 60")
    place = launcher.prepare(wanted)
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with closing(open_at(place)) as there:
        assert there.prepare(wanted) == place
        there.start(wanted)
        wait_for(lambda: there.logs(wanted.key).text == "begun\n")
        assert there.status(wanted.key) == launcher.status(wanted.key) == JobStatus(JobState.RUNNING)
        there.stop(wanted.key, 0.0)
    assert launcher.status(wanted.key) == JobStatus(JobState.ABSENT)


def test_a_place_says_machine_folder_and_user(tmp_path):
    place = LocalLauncher(str(tmp_path)).prepare(Job("j", ("true",)))
    assert place == JobPlace(
        "local",
        machine=job_files.machine(),
        folder=str(tmp_path),
        mark=(tmp_path / "mark").read_text(),
        user="root" if os.geteuid() == 0 else place.user,
    )
    assert place.machine.partition("/")[0] == socket.gethostname()
    assert LocalLauncher(str(tmp_path)).prepare(Job("k", ("true",))) == place
    assert LocalLauncher(str(tmp_path / "other")).prepare(Job("j", ("true",))).mark != place.mark


@pytest.mark.parametrize(
    ("elsewhere", "reason"),
    [
        ({"machine": "gpu-z/1"}, r"is on gpu-z in .* of user .*, but {host} was asked as .*: ask from there"),
        ({"machine": "{host}/1"}, "but {host} was asked as .*, another machine of that name: ask from there"),
        ({"mark": "1"}, "where that folder is another one: ask from there, as that user"),
        (
            {"folder": "/nonexistent"},
            "in /nonexistent .* that folder cannot be read: No such file or directory",
        ),
    ],
    ids=["machine", "same name", "mark", "folder"],
)
@pytest.mark.parametrize("launcher", ["local", pytest.param("ssh", marks=pytest.mark.e2e)], indirect=True)
def test_another_machine_or_folder_knows_nothing_of_the_job(launcher, job, elsewhere, reason):
    wanted = job("sleep 60")
    place = launcher.prepare(wanted)
    launcher.start(wanted)
    host = socket.gethostname()
    other = {name: value.format(host=host) for name, value in elsewhere.items()}
    with closing(open_at(replace(place, **other))) as there:
        for call in calls(there, wanted):
            with pytest.raises(
                LauncherUnreachableError, match=f"^job {wanted.key} .*{reason.format(host=host)}"
            ):
                call()
    assert launcher.status(wanted.key).state is JobState.RUNNING
    assert not os.path.exists("/nonexistent")


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", ["docker"], indirect=True)
def test_another_engine_knows_nothing_of_the_job(launcher, job):
    wanted = job("sleep 60")
    place = launcher.prepare(wanted)
    engine = launcher._engine.api.info()["ID"]
    assert place == JobPlace("docker", machine=engine)
    launcher.start(wanted)
    with closing(open_at(replace(place, machine="another"))) as there:
        for call in calls(there, wanted):
            with pytest.raises(
                LauncherUnreachableError, match=f"^job {wanted.key} is in the Docker engine another"
            ):
                call()
    assert launcher.status(wanted.key).state is JobState.RUNNING


def as_nobody(act):
    """Return the text that `act` returns in a process of the user nobody."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            text = act()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_a_folder_of_another_user_is_unknown_and_not_absent(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    launcher, job = LocalLauncher(str(home / "jobs")), Job("j", ("sleep", "60"))
    place = launcher.prepare(job)
    launcher.start(job)
    try:
        for asked in (LocalLauncher(str(home / "jobs")), LocalLauncher(place=place)):
            for call in calls(asked, job)[1:]:
                assert as_nobody(call).startswith("LauncherUnreachableError: job j ")
        home.chmod(0o755)
        assert "folder cannot be read: Permission denied: ask from there, as that user" in as_nobody(
            lambda: LocalLauncher(place=place).status("j").state
        )
        assert launcher.status("j").state is JobState.RUNNING
    finally:
        launcher.stop("j", 0.0)


def test_a_folder_that_another_user_may_write_is_not_looked_into(tmp_path, as_another_user):
    """Else its owner could have a user with more rights kill a process group of their choice."""
    launcher, job = LocalLauncher(str(tmp_path / "jobs")), Job("j", ("true",))
    place = launcher.prepare(job)
    as_another_user()
    for call in calls(LocalLauncher(place=place), job):
        with pytest.raises(LauncherUnreachableError, match="ask from there, as that user"):
            call()


def forged(folder: Path, key: str, process: subprocess.Popen[bytes]) -> Path:
    """Make the directory of a job that was never started, and say that it is this process."""
    directory = folder / key
    directory.mkdir(parents=True)
    (directory / "group").write_text(str(process.pid))
    (directory / "lock").touch()
    return directory


@pytest.mark.parametrize("name", ["local", "terminal", "ssh"])
def test_a_folder_without_its_machine_is_nobody_s_place(tmp_path, name, bystander):
    """Else who names it has the account that asks end processes, and make folders, of their choice."""
    forged(tmp_path, "j", bystander)
    place = JobPlace(name, folder=str(tmp_path))
    launcher = SSHLauncher(place, LocalPython()) if name == "ssh" else open_at(place)
    for call in calls(launcher, Job("j", ("true",))):
        with pytest.raises(LauncherUnreachableError, match="job j is on no stated machine in "):
            call()
    assert bystander.poll() is None
    assert [each.name for each in tmp_path.iterdir()] == ["j"]


def test_a_mark_is_that_of_the_file_that_was_read(tmp_path, monkeypatch, as_another_user):
    """Its path may be a link to another's file a moment later."""
    place = LocalLauncher(str(tmp_path)).prepare(Job("j", ("true",)))
    as_another_user()
    look, owner = os.stat, os.geteuid()
    found = os.stat_result([owner if at == stat.ST_UID else field for at, field in enumerate(look(tmp_path))])
    monkeypatch.setattr(os, "stat", lambda path, **more: found if "mark" in str(path) else look(path, **more))
    with pytest.raises(LauncherUnreachableError, match="ask from there, as that user"):
        LocalLauncher(place=place).status("j")


def test_a_directory_that_is_another_user_s_names_no_process_to_end(tmp_path, bystander, as_another_user):
    """It may come to stand in the place of the folder that was verified."""
    directory = forged(tmp_path, "j", bystander)
    as_another_user()
    assert not ending.send_signal(str(directory), signal.SIGKILL)
    assert bystander.poll() is None


def test_a_link_to_the_directory_of_another_s_job_leads_to_no_process_of_it(tmp_path, bystander):
    (tmp_path / "j").symlink_to(forged(tmp_path, "theirs", bystander))
    ending.send_signal(str(tmp_path / "j"), signal.SIGKILL)
    assert bystander.poll() is None


def test_a_lock_that_is_a_link_is_not_that_of_the_processes_which_have_its_file(tmp_path, bystander):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "lock").symlink_to(f"/proc/{bystander.pid}/fd/0")
    assert list(job_processes.processes_of(str(tmp_path / "j"))) == []


def test_only_an_account_s_own_tombstones_are_removed_with_time(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old").touch()
    os.utime(tmp_path / "logs" / "old", (0, 0))
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "ended").symlink_to(tmp_path / "logs")
    job_files.prune_tombstones(str(tmp_path / "jobs"))
    (tmp_path / "logs").rename(tmp_path / "ended")
    own = os.geteuid()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: own + 1)
        job_files.prune_tombstones(str(tmp_path))
    assert (tmp_path / "ended" / "old").exists()
    job_files.prune_tombstones(str(tmp_path))
    assert not (tmp_path / "ended" / "old").exists()


@pytest.mark.parametrize("name", ["exit_code", "lock"])
def test_a_job_whose_files_cannot_be_read_is_neither_absent_nor_finished(tmp_path, name):
    (tmp_path / "j" / name).mkdir(parents=True)
    with pytest.raises(LauncherUnreachableError, match=r"job j cannot be seen on .*: .*Is a directory"):
        LocalLauncher(str(tmp_path)).status("j")


def test_a_process_that_lacks_what_a_place_needs_answers_unknown():
    for place in (JobPlace("ssh", "h", "nope", "m"), JobPlace("cloud", machine="m")):
        with pytest.raises(LauncherUnreachableError, match=r"'nope'|unknown launcher 'cloud'"):
            open_at(place)
        with pytest.raises(LauncherError) as before_prepare:
            open_at(JobPlace(place.launcher, place.address, place.conn_id))
        assert not isinstance(before_prepare.value, LauncherUnreachableError)


def test_a_terminal_is_looked_for_on_its_machine_or_by_ssh(tmp_path):
    here = LocalLauncher(str(tmp_path), JobPlace("terminal", "gpu-z")).prepare(Job("j", ("true",)))
    assert here.launcher == "terminal"
    assert open_at(here).status("j") == JobStatus(JobState.ABSENT)
    assert isinstance(open_at(replace(here, machine="gpu-z/1")), SSHLauncher)
    with pytest.raises(LauncherUnreachableError, match="a terminal of gpu-z, which has no address"):
        open_at(replace(here, machine="gpu-z/1", address=""))


def test_a_server_without_python_has_started_nothing_but_may_run_the_job():
    def answer(channel, command):
        channel.recv(1)  # a shell ends after the server has said that it runs
        channel.send_exit_status(127)
        channel.close()

    launcher = SSHLauncher(JobPlace("ssh", "h"), SSHPython("h", lambda: logged_in(answer)))
    job = Job("j", ("true",))
    with pytest.raises(LauncherError, match=r"^server h has no python3") as prepared:
        launcher.prepare(job)
    assert not isinstance(prepared.value, LauncherUnreachableError)
    for call in calls(launcher, job)[1:]:
        with pytest.raises(LauncherUnreachableError, match=r"^server h has no python3"):
            call()
    launcher.close()


def test_a_start_that_fails_says_whether_the_job_runs(tmp_path, monkeypatch):
    launcher = LocalLauncher(str(tmp_path))
    launcher.start(job := Job("j", ("sleep", "60")))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", no_descriptor)
        with pytest.raises(LauncherUnreachableError, match="Too many open files"):
            launcher.start(job)
        with pytest.raises(LauncherError, match="Too many open files") as failed:
            launcher.start(replace(job, key="k"))
    assert not isinstance(failed.value, LauncherUnreachableError)
    assert launcher.status("j").state is JobState.RUNNING
    launcher.stop("j", 0.0)


def no_descriptor(*_):
    raise OSError(24, "Too many open files")


def test_nothing_runs_after_a_start_whose_outer_shell_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "WRAPPER", f"{starting.WRAPPER}\nkill -9 $$\n")
    launcher = LocalLauncher(str(tmp_path))
    with pytest.raises(LauncherError, match=r"^job j could not be started on ") as failed:
        launcher.start(Job("j", ("sleep", "60")))
    assert not isinstance(failed.value, LauncherUnreachableError)
    assert launcher.status("j").state is JobState.FINISHED
    left = list(job_processes.processes_of(str(tmp_path / "j")))
    assert left == []


JOBS = Path(job_files.__file__).parents[1]
SENT = ("directories/*.py", "launchers/slurm_*.py", "launchers/standing_program.py", "launchers/walls.py")


@pytest.mark.parametrize(
    "path", [path for each in SENT for path in JOBS.glob(each)], ids=lambda path: path.stem
)
def test_what_is_sent_to_servers_is_of_python_3_7(path):
    ast.parse(path.read_text(), feature_version=(3, 7))


def test_a_job_that_began_and_ended_while_another_start_waited_runs_once(tmp_path, monkeypatch):
    launcher, job = LocalLauncher(str(tmp_path)), Job("j", ("true",))
    locked, first, begun = job_files.locked, iter([True]), []

    def late(*arguments):
        if next(first, False):
            launcher.start(job)
            wait_until_ended(launcher, "j")
            begun.append((tmp_path / "j" / "group").read_text())
        return locked(*arguments)

    monkeypatch.setattr(job_files, "locked", late)
    launcher.start(job)
    assert [(tmp_path / "j" / "group").read_text()] == begun
