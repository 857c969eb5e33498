"""Jobs with a process beside them: in its terminal, or in its session; they end with it, or it waits."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from resource_manager.jobs.directories import job_files
from resource_manager.jobs.directories.ending import refuse_ended, terminate
from resource_manager.jobs.directories.job_files import verify
from resource_manager.jobs.directories.job_processes import know_group
from resource_manager.jobs.directories.starting import process_environment

ENDING = (signal.SIGTERM, signal.SIGHUP)
ENDED_CODE = 128 + signal.SIGTERM
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTTOU)


def attend_or_say(place: Mapping[str, str], **call: Any) -> int:
    """Return what `attend` returns at that place, 126 if it did not start the job: a line says why."""
    try:
        verify(call["key"], place)
        return attend(**call)
    except (job_files.RefusedError, OSError, RuntimeError) as error:
        print(f"gpu-manager: {error}", file=sys.stderr)
        return 126


def attend(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    working_dir: str = ".",
    ttl_s: float = 0.0,
    walls: Sequence[str] = (),
) -> int:
    """Run `command` in this process's terminal; return its exit code, 128 + n if signal n ended it.

    It has the terminal if this process `is_interactive`, else no input from one. `walls` come before it, and
    the job's environment is set within them.
    All its processes end with it, and when this process gets SIGTERM or SIGHUP, as it does when its parent
    dies, or after `ttl_s` (if any) without a `sign` of its caller: then the exit code is 143. Raises
    `RefusedError`, `RuntimeError` or `OSError` if it was not started.
    """
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*ENDING, signal.SIGCHLD):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: None)
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    has_terminal = is_interactive()
    directory = job_files.directory_of(root, key)
    refuse_ended(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    job_files.write_file(os.path.join(directory, job_files.SIGN), "")
    with job_files.lock_of_unstarted(directory) as lock:
        if lock is None:
            raise RuntimeError(f"job {key} was started before")
        if _is_told_to_end(woken, 0.0):
            return ENDED_CODE

        def own_group() -> None:
            os.setpgid(0, 0)
            job_files.write_file(os.path.join(directory, "group"), str(os.getpid()))
            if job_files.exists(job_files.tombstone_of(root, key)):
                os._exit(ENDED_CODE)
            if has_terminal:
                with suppress(OSError):  # another session's, which needs no foreground
                    os.tcsetpgrp(0, os.getpid())
            for number in TERMINAL_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for number in () if has_terminal else (signal.SIGTTIN, signal.SIGTTOU):
                signal.signal(number, signal.SIG_IGN)  # else /dev/tty would stop it, again at each try

        try:
            job = subprocess.Popen(
                [*walls, *command],
                cwd=os.path.expanduser(working_dir),
                env=process_environment(os.environ, walls, environment, directory),
                stdin=subprocess.DEVNULL if os.isatty(0) and not has_terminal else None,
                pass_fds=(lock,),
                preexec_fn=own_group,
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{directory} cannot be written"
            print(f"{command[0]}: {reason}", file=sys.stderr)
            return 127 if isinstance(error, FileNotFoundError) else 126
    code = _wait(job.pid, woken, os.path.join(directory, job_files.SIGN), ttl_s)
    know_group(directory)  # whose processes are left, though nothing of the job may mark them
    if has_terminal:
        with suppress(OSError):  # the terminal is gone, or another session's
            os.tcsetpgrp(0, os.getpgrp())
    terminate(root, key)
    if job_files.exists(job_files.tombstone_of(root, key)):
        shutil.rmtree(directory, ignore_errors=True)  # it may have been made after `stop`
    else:
        with suppress(OSError):  # another process has just stopped the job
            job_files.write_file(os.path.join(directory, "exit_code"), str(code))
    return code


def is_interactive() -> bool:
    """Return whether input and output are terminals, and no other group of processes has the foreground."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # another session's: nobody is in the background of it here
        return True


def _wait(process: int, woken: int, sign_path: str, ttl_s: float) -> int:
    """Return the exit code of a child, or that of SIGTERM if it has to end.

    One that Ctrl-Z stopped goes on, since its lease would be idle.
    """
    signed, silent_since = job_files.modified_at(sign_path), time.monotonic()
    while True:
        found, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            os.killpg(process, signal.SIGCONT)
        elif found:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if _is_told_to_end(woken, ttl_s / 20 if ttl_s else None):
            return ENDED_CODE
        if job_files.modified_at(sign_path) != signed:
            signed, silent_since = job_files.modified_at(sign_path), time.monotonic()
        if ttl_s and time.monotonic() - silent_since >= ttl_s:
            return ENDED_CODE


def _is_told_to_end(woken: int, timeout_s: float | None) -> bool:
    """Wait for a signal to this process; return whether one of them ends the job."""
    ready, _, _ = select.select([woken], [], [], timeout_s)
    return bool(ready) and any(number in ENDING for number in os.read(woken, 4096))


def sign(root: str, key: str) -> None:
    """Tell `attend` of the job, if it still runs, that its caller is there."""
    with suppress(FileNotFoundError):
        os.utime(os.path.join(job_files.directory_of(root, key), job_files.SIGN))


def run(root: str, key: str, command: str, environment: Mapping[str, str], walls: Sequence[str] = ()) -> int:
    """Run a command of the login shell as the job in this process's session; return its exit code.

    `walls` come before the shell, and the job's environment is set within them. This process waits for it
    whatever signals it gets, and holds the lock: the job is known to run also where its own process is
    another user's.
    """
    refuse_ended(root, key)
    directory = job_files.directory_of(root, key)
    with job_files.lock_of_unstarted(directory) as lock:
        if lock is None:
            raise RuntimeError(f"job {key} was started before")
        numbers = (*ENDING, *TERMINAL_SIGNALS, signal.SIGUSR2)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # not ignored: what is started has the default again
        job_files.write_file(os.path.join(directory, "group"), str(os.getpgrp()))
        refuse_ended(root, key)
        shell = os.environ.get("SHELL") or "/bin/sh"
        job = subprocess.Popen(
            [*walls, shell, "-c", command],
            env=process_environment(os.environ, walls, environment, directory),
            pass_fds=(lock,),
        )
        code = job.wait()
    code = 128 - code if code < 0 else code
    for number in numbers:  # Python gives its handlers up before it ends, and then the code would be lost
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # another process has just stopped the job
        job_files.write_file(os.path.join(directory, "exit_code"), str(code))
    return code
