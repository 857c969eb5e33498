"""Jobs in a terminal, here and by the ssh program: found, ended, and gone with their caller."""

import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from typing import Any

import pexpect
import psutil
import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import ending, job_states
from resource_manager.jobs.directories.job_files import machine
from resource_manager.jobs.launchers import (
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherUnreachableError,
    open_at,
    terminal,
)
from resource_manager.jobs.launchers.server_library import library_of
from tests.eventually import processes_of_command, wait_for

SLEEP = f"sleep 62.{os.getpid()}"
"""Command that no other process of this machine runs."""
sleepers = partial(processes_of_command, SLEEP)


@pytest.fixture(params=["here", pytest.param("ssh", marks=pytest.mark.e2e)])
def launcher(request, tmp_path, monkeypatch):
    """Launcher of jobs in a terminal whose `here` is False if it is reached by the ssh program."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    if request.param == "here":
        address = ""
    else:
        server = request.getfixturevalue("ssh_server")
        address = f"127.0.0.1:{server.port}"
        program = tmp_path / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -i {server.key} -o {" -o ".join(NEW_HOST)} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    launcher: Any = terminal.open_terminal(JobPlace("terminal", address))
    launcher.root = str(tmp_path / "jobs")
    launcher.here = not address
    return launcher


NEW_HOST = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")


def job(command, key="j"):
    return Job(key, ("/bin/sh", "-c", command))


@pytest.mark.parametrize(
    ("address", "server", "named", "is_here"),
    [
        ("", "gpu-a", "", True),
        ("localhost", "gpu-a", "", True),
        ("ada@localhost:22", "gpu-a", "", True),
        ("localhost:2222", "gpu-a", "", False),
        ("127.0.0.1", "gpu-a", "", True),
        (socket.gethostname(), "gpu-a", "", True),
        ("192.0.2.7", "gpu-a", "", False),
        ("192.0.2.7", "gpu-a", "gpu-a", True),
        ("", "gpu-b", "gpu-a", False),
    ],
)
def test_the_server_that_is_this_machine_is_named_or_known_by_its_address(
    address, server, named, is_here, monkeypatch
):
    """As docs/command-line.md has it."""
    monkeypatch.setenv(terminal.OWN_SERVER, named)
    assert terminal.is_here(address, server) is is_here


def test_an_agent_tells_whether_the_server_is_this_machine(monkeypatch):
    here = machine()
    assert terminal.is_here("192.0.2.7", "gpu-a", here), "behind another address"
    assert not terminal.is_here("127.0.0.1", "gpu-a", "gpu-a/1"), "a tunnel"
    assert not terminal.is_here("", "gpu-a", "gpu-a/1"), "nobody logs in there, and its jobs are not here"
    assert not terminal.is_here("localhost:2222", "gpu-a", here), "another sshd"
    monkeypatch.setenv(terminal.OWN_SERVER, "gpu-b")
    assert not terminal.is_here("192.0.2.7", "gpu-a", here), "the setting decides"


def test_a_job_in_a_terminal_is_found_at_its_place_and_stopped(launcher, monkeypatch, tmp_path):
    place = launcher.prepare(job(SLEEP))
    assert launcher.status("j") == JobStatus(JobState.ABSENT)
    attended = terminal.attend(place, job(SLEEP), launcher.here)
    wait_for(sleepers)
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "other"))
    with closing(open_at(place)) as there:
        assert there.status("j") == JobStatus(JobState.RUNNING)
        there.stop("j")
        assert sleepers() == []
        assert attended.wait(60) == 143
        assert there.status("j") == JobStatus(JobState.ABSENT)
        with pytest.raises(AlreadyEndedError):
            there.prepare(job(SLEEP))


def test_a_stopped_job_is_not_begun_in_a_terminal(launcher):
    place = launcher.prepare(job(SLEEP))
    launcher.stop("j")
    with pytest.raises(AlreadyEndedError, match="job j has ended already; it is not started again"):
        terminal.attend(place, job(SLEEP), launcher.here)
    assert launcher.status("j") == JobStatus(JobState.ABSENT)
    assert sleepers() == []


def test_a_job_is_not_begun_at_another_place(tmp_path):
    launcher: Any = terminal.open_terminal(JobPlace("terminal"))
    launcher.root = str(tmp_path / "jobs")
    place = launcher.prepare(job(SLEEP))
    (tmp_path / "jobs" / "mark").write_text("another")
    with pytest.raises(LauncherUnreachableError, match="that folder is another one"):
        terminal.attend(place, job(SLEEP), here=True)
    with pytest.raises(LauncherUnreachableError, match="that folder is another one"):
        launcher.sign("j")


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("", True),
        ("localhost", True),
        ("127.0.0.1", True),
        ("ada@127.0.0.1:22", True),
        ("127.0.0.1:2222", False),
        (socket.gethostname(), True),
        ("192.0.2.7", False),
        ("no-such-host.invalid", False),
    ],
)
def test_this_machine_is_found_by_its_interfaces_loopback_included(address, is_here, monkeypatch):
    monkeypatch.delenv("GPU_MANAGER_SERVER", raising=False)
    assert terminal.is_here(address, "gpu-a") == is_here
    monkeypatch.setenv("GPU_MANAGER_SERVER", "gpu-b")
    assert not terminal.is_here(address, "gpu-a")


def test_no_word_or_variable_of_a_job_is_on_a_command_line_but_its_own(launcher):
    secret = Job("j", ("/bin/sh", "-c", SLEEP, "a-word"), {"KEY": "a-variable"})
    attended = terminal.attend(launcher.prepare(secret), secret, launcher.here)
    wait_for(sleepers)
    lines = [" ".join(process.cmdline()) for process in processes_of(attended.pid)]
    assert [line for line in lines if "a-word" in line] in ([], [f"/bin/sh -c {SLEEP} a-word"])
    assert not [line for line in lines if "a-variable" in line or "def attend" in line]
    launcher.stop("j")
    assert attended.wait(60) == 143


def processes_of(pid):
    """Return the process and those under it, which may end meanwhile."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.thorough
def test_a_job_lives_as_long_as_its_caller_gives_signs(launcher):
    place = launcher.prepare(job(SLEEP))
    ttl_s = 3.0 if launcher.here else 6.0
    attended = terminal.attend(place, job(SLEEP), launcher.here, ttl_s)
    wait_for(sleepers)
    began = time.monotonic()
    while time.monotonic() < began + 1.3 * ttl_s:
        launcher.sign("j")
        time.sleep(0.1)
    assert sleepers()
    assert attended.wait(60) == 143
    assert time.monotonic() > began + 2 * ttl_s
    assert sleepers() == []
    assert launcher.status("j") == JobStatus(JobState.FINISHED, 143)
    launcher.sign("j")
    launcher.stop("j")


def attending_program(root, command, ttl_s, changes=""):
    """Return a program that attends the job with these changes to `jobs.directories`."""
    call = {
        "root": str(root),
        "key": "j",
        "command": ["/bin/sh", "-c", command],
        "environment": {},
        "ttl_s": ttl_s,
    }
    known = "from resource_manager.jobs.directories import attending, job_files"
    return f"{library_of()}{known}\n{changes}\nraise SystemExit(attend(**{call!r}))"


def attended_source(*given):
    """Return a process that attends the job so."""
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", attending_program(*given)])


def test_a_job_that_ignores_sigterm_is_gone_when_its_caller_is_silent(tmp_path):
    command = f"trap '' TERM; setsid {SLEEP} & while :; do {SLEEP}; done"
    attended = attended_source(tmp_path, command, 1.0, "terminate.__defaults__ = (0.3,)")
    wait_for(lambda: len(sleepers()) == 2)
    assert attended.wait(60) == 143
    assert sleepers() == []
    assert job_states.status(str(tmp_path), "j")["exit_code"] == 143


def test_a_job_is_gone_when_its_caller_is_halted(tmp_path):
    """The caller is there, and so is its terminal: it gives no sign."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER.format(root=str(tmp_path), sleep=SLEEP)],
        env={**os.environ, "HOME": "/"},
    )
    try:
        wait_for(sleepers)
        caller.send_signal(signal.SIGSTOP)
        wait_for(lambda: not sleepers())
        assert psutil.Process(caller.pid).status() == psutil.STATUS_STOPPED
    finally:
        caller.kill()
        caller.wait()


CALLER = """
import time
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import Job, terminal
launcher = terminal.open_terminal(JobPlace("terminal"))
launcher.root = {root!r}
job = Job("j", tuple({sleep!r}.split()))
terminal.attend(launcher.prepare(job), job, True, 3.0)
while True:
    launcher.sign("j")
    time.sleep(0.1)
"""


def test_a_signal_at_any_moment_of_the_start_leaves_nothing_behind(tmp_path):
    choice = random.Random(1)
    for number in range(10):
        root = tmp_path / str(number)
        attended = attended_source(root, SLEEP, 0.0)
        time.sleep(choice.uniform(0.0, 0.3))
        attended.terminate()
        assert attended.wait(60) in (143, -signal.SIGTERM)
        assert sleepers() == []
        assert job_states.status(str(root), "j")["state"] != "running"


MOMENTS = ("attending.refuse_ended", "job_files.locked", "job_files.write_file", "subprocess.Popen")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", [*MOMENTS, "attending._wait"])
def test_a_signal_at_each_step_of_the_start_leaves_nothing_behind(tmp_path, moment, number):
    changes = (
        "def signalled(act):\n"
        "    def acting(*given, **more):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        return act(*given, **more)\n"
        "    return acting\n"
        f"{moment} = signalled({moment})\n"
    )
    assert attended_source(tmp_path, SLEEP, 0.0, changes).wait(60) == 143
    assert sleepers() == []
    assert job_states.status(str(tmp_path), "j")["state"] != "running"


def test_a_job_halted_between_its_fork_and_its_command_is_ended_by_stop(tmp_path):
    """`stop` finds the process before it has become the command."""
    changes = (
        "write = job_files.write_file\n"
        "def write_file(path, text, dated=None):\n"
        "    write(path, text, dated)\n"
        "    if path.endswith('/group'): os.kill(os.getpid(), signal.SIGSTOP)\n"
        "job_files.write_file = write_file\n"
    )
    attended = attended_source(tmp_path, SLEEP, 0.0, changes)
    try:
        wait_for((tmp_path / "j" / "group").exists)
        assert job_states.status(str(tmp_path), "j")["state"] == "running"
        ending.stop(str(tmp_path), "j", 0.0)
        attended.wait(60)
    finally:
        attended.kill()
        attended.wait()
    assert sleepers() == []
    assert job_states.status(str(tmp_path), "j")["state"] == "absent"


def test_a_job_halted_before_it_looked_for_the_tombstone_starts_nothing(tmp_path):
    changes = (
        "really = job_files.exists\n"
        "def exists(path):\n"
        "    if os.getpid() != attendant and 'ended' in path:\n"
        "        open(path, 'w').close()\n"
        "    return really(path)\n"
        "job_files.exists, attendant = exists, os.getpid()\n"
    )
    (tmp_path / "ended").mkdir()
    assert attended_source(tmp_path, f"touch {tmp_path}/ran", 0.0, changes).wait(60) == 143
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "j").exists()


def test_a_job_is_seen_to_run_from_its_first_moment(tmp_path):
    show = f"cat {tmp_path}/j/group; echo; echo $$"
    call = attended_source(tmp_path, f"({show}) > {tmp_path}/said", 0.0)
    assert call.wait(60) == 0
    written, own = (tmp_path / "said").read_text().split()
    assert written == own


SHELL = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
way, program = sys.argv[1:]
options = {
    "behind": {"process_group": 0},
    "piped": {"stdout": subprocess.PIPE},
    "of another session": {"start_new_session": True},
}
done = subprocess.run([sys.executable, "-c", program], **options.get(way, {}))
has_it = os.tcgetpgrp(0) == os.getpgrp()
print((done.stdout or b"").decode(), f"exit code {done.returncode},", "the shell's" if has_it else "lost")
"""
"""Shell in a terminal that has a program in front or elsewhere, and says who has the terminal afterwards."""


def said_in_a_terminal(way, program):
    """Return what is said in a terminal whose shell has that program; a line is typed meanwhile."""
    child = pexpect.spawn(sys.executable, ["-c", SHELL, way, program], timeout=30, encoding="utf-8")
    try:
        child.sendline("yes")
        child.expect(pexpect.EOF)
        return child.before
    finally:
        child.close(force=True)


HAS_TERMINAL = """
import os, sys
try:
    has_it = os.tcgetpgrp(2) == os.getpgrp()
except OSError:
    has_it = False
if not (line := sys.stdin.readline()):
    try:
        os.read(os.open("/dev/tty", os.O_RDONLY), 1)
    except OSError as error:
        line = error.strerror
print(f"in front: {has_it}, input:", line.strip())
"""


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("in front", "in front: True, input: yes"),
        ("behind", "in front: False, input: Input/output error"),
        ("piped", "in front: False, input: Input/output error"),
        ("of another session", "in front: False, input: yes"),
    ],
)
def test_a_job_has_the_terminal_only_of_a_caller_in_front(tmp_path, way, said):
    """The shell lost it to a job in the background, and a pager was stopped with its caller."""
    command = shlex.join([sys.executable, "-c", HAS_TERMINAL])
    lines = said_in_a_terminal(way, attending_program(tmp_path, command, 0.0)).splitlines()
    assert [line.strip() for line in lines if line.strip() not in ("yes", "")] == [
        said,
        "exit code 0, the shell's",
    ]


BY_SSH = """
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import Job, terminal
launcher = terminal.open_terminal(JobPlace("terminal", "gpu-a"), False)
job = Job("j", ("true",))
raise SystemExit(terminal.attend(launcher.prepare(job), job, False).wait())
"""


def ssh_that(folder, monkeypatch, script):
    """Have `ssh` be this script of a shell."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("way", "options"),
    [("in front", "-t -o"), ("behind", "-T -n"), ("piped", "-T -n"), ("of another session", "-t -o")],
)
def test_the_ssh_program_has_the_terminal_only_of_a_caller_in_front(tmp_path, monkeypatch, way, options):
    """In the background, to read from it stopped the ssh program, its caller and both their groups."""
    monkeypatch.setenv("HOME", str(tmp_path))
    script = f'echo "$*" >> {tmp_path}/calls\nfor last; do :; done\nexec sh -c "$last"'
    ssh_that(tmp_path, monkeypatch, script)
    assert "exit code 0, the shell's" in said_in_a_terminal(way, BY_SSH)
    assert (tmp_path / "calls").read_text().splitlines()[-1].startswith(options)


def test_no_ctrl_c_of_the_terminal_reaches_a_call_by_ssh(tmp_path, monkeypatch):
    """The second one ended the call that stops the job, and its GPUs stayed allocated."""
    own_session = "import os; print(os.getsid(0) == os.getpid())"
    ssh_that(tmp_path, monkeypatch, f"exec {shlex.join([sys.executable, '-c', own_session])}")
    assert terminal.SSHProgram("gpu-a").run("", 30.0) == (0, "True\n", "")
