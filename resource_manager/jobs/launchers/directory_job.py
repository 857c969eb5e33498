"""Detached jobs with a directory each; standard library only, since the ssh launcher sends this file along.

`<root>/<key>/` holds `log`, `group` (the process group), `exit_code` once the job has ended, `lock`, and
`preempted` once the job was told that its lease is taken. `<root>/told/<key>`, which the job is not told of,
is then dated to the end of its grace. `<root>/kept/<key without its lease's fencing token>/` is the job's
own: it stays for the next lease of the same id, until a job has succeeded.
`<root>/ended/<key>` is the tombstone of a job that was stopped, kept for a day: it is not started again.
`<root>/mark` has a number that only this folder has, so that nobody takes another for it.
Every process of the job inherits a flock on `lock`, so the lock is free only when the job is gone, even if
some of its processes were killed or process ids were reused. A process that closed the inherited
descriptor, as Python's subprocesses do, is found by `GPU_JOB_LOCK` in its environment when the job is
stopped. A job may put anything in place of these files: what is read is a bounded regular file, or none.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import pwd
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, BinaryIO

DEFAULT_ROOT = "~/.gpu-manager/jobs"
CHECKPOINT = "checkpoint"
PREEMPTED = "preempted"
SIGN = "sign"
TOLD = "told"
SET_WITHIN = "GPU_JOB_ENVIRONMENT"
NOT_INHERITED = re.compile("_?AIRFLOW_(?!HOME$)|GPU_MANAGER_(?!NVML$)")
"""Variables of Airflow and the agent, keys and passwords among them, that their jobs do not inherit."""

KEPT = "kept"
ENDED = "ended"
ENDED_S = 86400.0
ANY = "of any lease"
LOG_CHUNK_BYTES = 256 * 1024
MAX_SHORT_BYTES = 256
MAX_TIME_S = 1e12  # as of `core.models`
KEY = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]{1,255}")
TICK_S = 0.1
BEGINNING_S = 0.2
GROWTH_EVERY_S = 1.0
STARTER_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 10.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ENDING = (signal.SIGTERM, signal.SIGHUP)
ENDED_CODE = 128 + signal.SIGTERM
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTTOU)

# The outer shell exits at once, so that the job has no parent here. It looks for the tombstone when `stop`
# already sees it, so a start that was halted before starts nothing. If it cannot write `group`, as on a full
# disk, it starts nothing either, since a job without this file would be started twice. The inner shell writes
# the exit code; it traps the signals that end the job; a trapped signal is reset to its default in children.
# A job that is told before its command has begun does not begin: the command would not know of it.
WRAPPER = """
ended=$1; shift
[ ! -e "$ended" ] || exit
echo $$ > group.new && mv group.new group || exit
(
    told=
    trap told=1 TERM INT HUP USR2
    directory=$PWD
    if [ "$told" ]; then (exit 143); else cd "$GPU_JOB_WORKING_DIR" && "$@"; fi
    echo $? > "$directory/exit_code.new" && mv "$directory/exit_code.new" "$directory/exit_code"
) > log 2>&1 &
"""


class RefusedError(Exception):
    """The call was refused, for a reason that its caller has to tell from other errors."""


class ElsewhereError(RefusedError):
    """The job is on another machine, in another folder or another user's: its state is unknown here."""


class StillRunsError(RefusedError):
    """The job is being stopped, and not gone yet."""


class NotStartedError(RefusedError):
    """The job was not started, and no process of it runs."""


class AlreadyEndedError(NotStartedError):
    """The job was stopped, so it is not started again."""


def machine() -> str:
    """Return what tells this machine from others: its name, which a container has too, and its id."""
    try:
        with open("/etc/machine-id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def verify(key: str, place: Mapping[str, str], here: str = "") -> None:
    """Raise `ElsewhereError` unless the job's place, as `prepare` returns it, is this machine and folder.

    `here` is what stands for the machine where several share the folder.
    """
    here, reason = here or machine(), ""
    there, asked = (name.partition("/")[0] for name in (place["machine"], here))
    if place["machine"] != here:
        reason = ", another machine of that name" if there == asked else ""
    else:
        mark = os.path.join(place["folder"], "mark")
        try:
            if text_of(mark) != place["mark"]:
                reason = ", where that folder is another one"
            elif os.stat(mark).st_uid == os.geteuid():
                return
            # Else its owner could have a user with more rights kill a process group of their choice.
        except OSError as error:
            reason = f", where that folder cannot be read: {error.strerror}"
    raise ElsewhereError(
        f"job {key} is on {there} in {place['folder']} of user {place['user']}, but {asked} was asked as "
        f"{_user()}{reason}: ask from there, as that user"
    )


def prepare(root: str, key: str, port: int = 0, walls: Sequence[str] = ()) -> dict[str, Any]:
    """Make the job's directory and test that a start can write there and that `port`, if any, is free.

    Returns {"running": the other jobs of this root that run}, the job's place as "machine", "folder",
    "mark" and "user", and as "walls" what `walls`, arguments of Python, say is missing for them. Raises
    `OSError`, or `RefusedError` for a job that was stopped.
    """
    refuse_ended(root, key)
    directory = directory_of(root, key)
    folder = os.path.dirname(directory)
    for path in (directory, _folder(root, ENDED)):
        os.makedirs(path, mode=0o700, exist_ok=True)
    write_file(os.path.join(directory, "prepared"), "1\n")
    if port:
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections take no port
            try:
                probe.bind(("", port))
            except OSError as error:
                raise OSError(f"port {port} cannot be bound: {error.strerror}") from error
    return {
        "running": [
            name for name in jobs_in(root) if name != key and status(root, name)["state"] == "running"
        ],
        "machine": machine(),
        "folder": folder,
        "mark": _mark(folder),
        "user": _user(),
        "walls": _missing_for_walls(directory, walls) if walls else "",
    }


def _missing_for_walls(directory: str, walls: Sequence[str]) -> str:
    """Return why a job of this directory cannot have these walls, empty if it can."""
    tried = subprocess.run(
        [sys.executable, *walls],
        env={**os.environ, "GPU_JOB_LOCK": os.path.join(directory, "lock")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    said = (tried.stdout if tried.returncode == 0 else tried.stderr).decode("utf-8", "replace")
    return (said.strip().splitlines() or [""])[-1][:MAX_SHORT_BYTES]


def start(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    working_dir: str = ".",
    files: Mapping[str, str] | None = None,
    walls: Sequence[str] = (),
) -> dict[str, Any]:
    """Start `command` in a new session, unless this job was started before; return {"began": whether not}.

    `walls` come before it, and the job's environment is set within them. Each of the variables in `files` has
    the path of a file with the text given there. Raises `NotStartedError` if no process of the job runs;
    after any other error it is unknown.
    """
    directory = directory_of(root, key)
    refuse_ended(root, key)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with lock_of_unstarted(directory) as lock:
            if lock is None:
                return {"began": False}
            started = _spawn(root, key, lock, command, environment, working_dir, files or {}, walls)
    except OSError as error:
        if exists(os.path.join(directory, "lock")):
            raise
        refuse_ended(root, key)  # another process has just stopped the job
        raise NotStartedError(str(error)) from error
    if started.returncode != 0:
        terminate(root, key, 0.0)  # a signal may have ended the outer shell alone
        refuse_ended(root, key)
        reason = started.stderr.decode("utf-8", "replace").strip()
        raise NotStartedError(f"{directory} cannot be written: {reason}")
    return {"began": True}


def _spawn(
    root: str,
    key: str,
    lock: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    working_dir: str,
    files: Mapping[str, str],
    walls: Sequence[str],
) -> subprocess.CompletedProcess[bytes]:
    """Start the job's shells, with the lock; raises `NotStartedError` if there are none."""
    directory = directory_of(root, key)
    try:
        return subprocess.run(
            ["/bin/sh", "-c", WRAPPER, "sh", tombstone_of(root, key), *walls, *command],
            cwd=directory,
            env=_process_environment(
                {name: text for name, text in os.environ.items() if not NOT_INHERITED.match(name)},
                walls,
                environment,
                {
                    **own_variables(root, key, files),
                    "GPU_JOB_WORKING_DIR": os.path.abspath(working_dir),
                    "GPU_JOB_LOCK": os.path.join(directory, "lock"),
                },
            ),
            stdin=subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,
            stderr=subprocess.PIPE,
        )
    except (OSError, ValueError) as error:
        raise NotStartedError(str(error)) from error


def _process_environment(
    inherited: Mapping[str, str], walls: Sequence[str], environment: Mapping[str, str], own: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the first process of a job; `own` variables are not the job's to choose.

    What builds the walls must not read the job's variables, by which it would run what the job names outside.
    """
    within = {**environment, **own}
    return {**inherited, **({**own, SET_WITHIN: json.dumps(within)} if walls else within)}


def own_variables(root: str, key: str, files: Mapping[str, str]) -> dict[str, str]:
    """Make the job's own directory and its files; return the variables that name them."""
    directory, own = directory_of(root, key), own_directory_of(root, key)
    os.makedirs(own, mode=0o700, exist_ok=True)
    paths = {variable: os.path.join(directory, variable.lower()) for variable in files}
    for variable, path in paths.items():
        write_file(path, files[variable])
    return {
        **paths,
        "GPU_JOB_DIR": own,
        "GPU_CHECKPOINT_FILE": os.path.join(own, CHECKPOINT),
        "GPU_PREEMPT_FILE": os.path.join(directory, PREEMPTED),
    }


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

    `walls` come before it, and the job's environment is set within them.

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
    terminal = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)
    directory = directory_of(root, key)
    refuse_ended(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    write_file(os.path.join(directory, SIGN), "")
    with lock_of_unstarted(directory) as lock:
        if lock is None:
            raise RuntimeError(f"job {key} was started before")
        if _is_told_to_end(woken, 0.0):
            return ENDED_CODE

        def own_group() -> None:
            os.setpgid(0, 0)
            write_file(os.path.join(directory, "group"), str(os.getpid()))
            if exists(tombstone_of(root, key)):
                os._exit(ENDED_CODE)
            if terminal is not None:
                os.tcsetpgrp(terminal, os.getpid())
            for number in TERMINAL_SIGNALS:
                signal.signal(number, signal.SIG_DFL)

        try:
            job = subprocess.Popen(
                [*walls, *command],
                cwd=os.path.expanduser(working_dir),
                env=_process_environment(
                    os.environ,
                    walls,
                    environment,
                    {
                        "GPU_PREEMPT_FILE": os.path.join(directory, PREEMPTED),
                        "GPU_JOB_LOCK": os.path.join(directory, "lock"),
                    },
                ),
                pass_fds=(lock,),
                preexec_fn=own_group,
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{directory} cannot be written"
            print(f"{command[0]}: {reason}", file=sys.stderr)
            return 127 if isinstance(error, FileNotFoundError) else 126
    code = _wait(job.pid, woken, os.path.join(directory, SIGN), ttl_s)
    if terminal is not None:
        with suppress(OSError):  # the terminal is gone
            os.tcsetpgrp(terminal, os.getpgrp())
    terminate(root, key)
    if exists(tombstone_of(root, key)):
        shutil.rmtree(directory, ignore_errors=True)  # it may have been made after `stop`
    else:
        with suppress(OSError):  # another process has just stopped the job
            write_file(os.path.join(directory, "exit_code"), str(code))
    return code


def stage(root: str, key: str, program: str) -> dict[str, Any]:
    """Write a program into the job's prepared directory; return its {"path": …}."""
    refuse_ended(root, key)
    path = os.path.join(directory_of(root, key), "program")
    write_file(path, program)
    return {"path": path}


def run(root: str, key: str, command: str, environment: Mapping[str, str], walls: Sequence[str] = ()) -> int:
    """Run a command of the login shell as the job in this process's session; return its exit code.

    `walls` come before the shell, and the job's environment is set within them. This process waits for it
    whatever signals it gets, and holds the lock: the job is known to run also where its own process is
    another user's.
    """
    refuse_ended(root, key)
    directory = directory_of(root, key)
    with lock_of_unstarted(directory) as lock:
        if lock is None:
            raise RuntimeError(f"job {key} was started before")
        for number in (*ENDING, *TERMINAL_SIGNALS):
            signal.signal(number, lambda *_: None)  # not ignored: what is started has the default again
        write_file(os.path.join(directory, "group"), str(os.getpgrp()))
        refuse_ended(root, key)
        shell = os.environ.get("SHELL") or "/bin/sh"
        job = subprocess.Popen(
            [*walls, shell, "-c", command],
            env=_process_environment(
                os.environ, walls, environment, {"GPU_JOB_LOCK": os.path.join(directory, "lock")}
            ),
            pass_fds=(lock,),
        )
        code = job.wait()
    code = 128 - code if code < 0 else code
    with suppress(OSError):  # another process has just stopped the job
        write_file(os.path.join(directory, "exit_code"), str(code))
    return code


def _wait(process: int, woken: int, sign_path: str, ttl_s: float) -> int:
    """Return the exit code of a child, or that of SIGTERM if it has to end.

    One that Ctrl-Z stopped goes on, since its lease would be idle.
    """
    signed, silent_since = modified_at(sign_path), time.monotonic()
    while True:
        found, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            os.killpg(process, signal.SIGCONT)
        elif found:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if _is_told_to_end(woken, ttl_s / 20 if ttl_s else None):
            return ENDED_CODE
        if modified_at(sign_path) != signed:
            signed, silent_since = modified_at(sign_path), time.monotonic()
        if ttl_s and time.monotonic() - silent_since >= ttl_s:
            return ENDED_CODE


def _is_told_to_end(woken: int, timeout_s: float | None) -> bool:
    """Wait for a signal to this process; return whether one of them ends the job."""
    ready, _, _ = select.select([woken], [], [], timeout_s)
    return bool(ready) and any(number in ENDING for number in os.read(woken, 4096))


def folder_of(root: str, user: str = "") -> str:
    """Return the folder of a root that was used by this user; raises `ElsewhereError`."""
    folder = os.path.abspath(os.path.expanduser(root))
    if user not in ("", _user()):
        raise ElsewhereError(f"jobs of user {user} cannot be seen as {_user()}: ask as that user")
    if not exists(os.path.join(folder, "mark")):
        raise ElsewhereError(f"{machine().partition('/')[0]} has no jobs folder {folder}")
    return folder


def running(root: str, user: str = "") -> dict[str, Any]:
    """Return {"running": the jobs of this root of which a process is left}.

    Raises `ElsewhereError` where the root was never used, or this is not that user: nothing is known there.
    """
    folder = folder_of(root, user)
    marked = _marked(folder)
    return {
        "running": [key for key in jobs_in(root) if key in marked or not _is_free(directory_of(root, key))]
    }


def sign(root: str, key: str) -> None:
    """Tell `attend` of the job, if it still runs, that its caller is there."""
    with suppress(FileNotFoundError):
        os.utime(os.path.join(directory_of(root, key), SIGN))


def status(root: str, key: str) -> dict[str, Any]:
    """Return {"state": absent | running | finished, "exit_code": number, "ended_at": time}, or None for both.

    `ended_at`, and `checkpoint_at` of the last checkpoint or None, are in seconds since the epoch, by the
    server's clock. `preempted`: the job was told that its lease is taken.
    """
    directory = directory_of(root, key)
    found = unstarted(root, key)
    if not exists(directory):
        return found
    gone = _is_free(directory)
    exit_code = number_in(directory, "exit_code")
    if exit_code is None and not gone:
        return {**found, "state": "running"}
    if exit_code is None and not exists(os.path.join(directory, "group")):
        return found
    # A killed job writes no exit code.
    ended_at = modified_at(os.path.join(directory, "exit_code"))
    return {**found, "state": "finished", "exit_code": exit_code, "ended_at": ended_at}


def unstarted(root: str, key: str) -> dict[str, Any]:
    """Return the status of a job that was not started."""
    return {
        "state": "absent",
        "exit_code": None,
        "ended_at": None,
        "checkpoint_at": modified_at(os.path.join(own_directory_of(root, key), CHECKPOINT)),
        "preempted": exists(told_file_of(root, key)),
    }


def logs(root: str, key: str, offset: int = 0) -> dict[str, Any]:
    """Return {"text": the output from byte `offset` on, "offset": the next one, "status": as `status` says}.

    "is_all": there was no more than that.
    It ends with a whole line, unless a line exceeds `LOG_CHUNK_BYTES` or the job has ended: a job that
    buffers its output leaves half a line until its buffer is full again or it ends.
    """
    found = status(root, key)  # read before the log, so that all output of a job that has ended is there
    return {**log_from(root, key, offset, found["state"] == "running"), "status": found}


def log_from(
    root: str, key: str, offset: int, is_running: bool, size: int = LOG_CHUNK_BYTES
) -> dict[str, Any]:
    """Return "text", "offset" and "is_all" as `logs` does, of at most `size` bytes."""
    try:
        with _open(os.path.join(directory_of(root, key), "log")) as log:
            log.seek(offset)
            data = log.read(size)
    except FileNotFoundError:
        return {"text": "", "offset": offset, "is_all": True}
    is_all = len(data) < size
    if is_running or not is_all:
        whole = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]  # a progress bar ends its lines with \r
        data = whole or (b"" if is_all else data)
    return {"text": data.decode("utf-8", "replace"), "offset": offset + len(data), "is_all": is_all}


def tail(root: str, key: str, size: int) -> dict[str, Any]:
    """Return the last `size` bytes of the output."""
    try:
        with _open(os.path.join(directory_of(root, key), "log")) as log:
            log.seek(max(os.fstat(log.fileno()).st_size - size, 0))
            return {"text": log.read(size).decode("utf-8", "replace")}
    except FileNotFoundError:
        return {"text": ""}


def terminate(root: str, key: str, grace_s: float = 10.0) -> None:
    """End every process of the job; its directory stays.

    SIGTERM comes first, SIGKILL after `grace_s`; with a grace of 0, SIGKILL alone. Raises `RuntimeError` if a
    process survives SIGKILL.
    """
    directory = directory_of(root, key)
    if not exists(directory):
        return
    # A SIGTERM just before SIGKILL would only run a handler that was done, or leave it in its middle.
    steps = ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S))
    for signal_number, timeout_s in steps if grace_s > 0 else steps[1:]:
        deadline = time.monotonic() + timeout_s
        signalled = False
        while not _is_gone(directory):
            # A second SIGTERM may interrupt a checkpoint.
            if not signalled or signal_number == signal.SIGKILL:
                signalled = _signal(directory, signal_number)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"the processes of job {key} survive SIGKILL")


def preempt(
    root: str, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0
) -> dict[str, Any]:
    """Tell the job once that its lease is taken, end it when `grace_s` is over; return its status.

    The file `preempted` appears with the grace in it, and the signal is sent; the grace is that of the first
    call and counts from then, whichever process calls again. Returns once the job has ended, or after
    `wait_s`.
    """

    def tell() -> None:
        _signal(directory_of(root, key), getattr(signal, f"SIG{signal_name}"))

    found = tell_and_end(root, key, grace_s, wait_s, 0.05, tell, status, terminate)
    if found["state"] != "running":
        terminate(root, key, 0.0)  # what it left behind, such as a process in the background
    return found


def tell_and_end(
    root: str,
    key: str,
    grace_s: float,
    wait_s: float,
    poll_s: float,
    tell: Callable[[], None],
    status: Callable[[str, str], dict[str, Any]],
    terminate: Callable[[str, str, float], None],
) -> dict[str, Any]:
    """Do as `preempt` for jobs that are told, seen and ended by these functions."""
    told = told_file_of(root, key)
    if status(root, key)["state"] == "running" and not exists(told):
        os.makedirs(_folder(root, TOLD), mode=0o700, exist_ok=True)
        write_file(told, "", dated=time.time() + grace_s)
        with suppress(OSError):  # another process has just stopped the job, or it put a folder there
            write_grace(os.path.join(directory_of(root, key), PREEMPTED), grace_s)
        tell()
    deadline = time.monotonic() + wait_s
    found = status(root, key)
    while found["state"] == "running":
        kill_at = modified_at(told)
        if kill_at is not None and time.time() >= kill_at:
            terminate(root, key, 0.0)
        elif time.monotonic() >= deadline:
            break
        else:
            time.sleep(poll_s)
        found = status(root, key)
    return found


def stop(root: str, key: str, grace_s: float = 10.0, keep: bool = False) -> dict[str, Any]:
    """End the job as `terminate` does, and remove its directory; return {"ran": whether it ran until then}.

    With `keep` the directory stays. Its tombstone comes first, also where no job was, so that a start that
    comes later starts nothing.
    Raises `RuntimeError`.
    """
    directory = directory_of(root, key)
    ran = False
    with suppress(OSError):  # the job put something else there
        ran = status(root, key)["state"] == "running"
    try:
        bury(root, key)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        terminate(root, key, grace_s)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, "log"))
        bury(root, key)
    terminate(root, key, grace_s)
    if not keep:
        remove(root, key)
    return {"ran": ran}


def remove(root: str, key: str) -> None:
    """Remove the files of a job that is gone, with its own directory if it has succeeded."""
    directory = directory_of(root, key)
    with suppress(OSError):  # the job put something else there
        if number_in(directory, "exit_code") == 0:  # nothing has to go on from there
            own = own_directory_of(root, key)
            if all(own_directory_of(root, name) != own for name in jobs_in(root) if name != key):
                shutil.rmtree(own, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.unlink(told_file_of(root, key))


def bury(root: str, key: str) -> None:
    """Write the job's tombstone, and remove those that are older than a day."""
    prune_tombstones(root)
    os.makedirs(_folder(root, ENDED), mode=0o700, exist_ok=True)
    write_file(tombstone_of(root, key), "")


def prune_tombstones(root: str) -> None:
    with suppress(FileNotFoundError):
        for entry in os.scandir(_folder(root, ENDED)):
            with suppress(FileNotFoundError):  # another process prunes, too
                if entry.stat().st_mtime < time.time() - ENDED_S:
                    os.unlink(entry.path)


def refuse_ended(root: str, key: str, is_gone: Callable[[str], bool] | None = None) -> None:
    """Raise `AlreadyEndedError` if the job was stopped, `StillRunsError` while it is being stopped.

    A folder without a job is removed: a start that came too late had made it again. `is_gone` says of a
    job's directory whether its processes are gone.
    """
    prune_tombstones(root)
    directory = directory_of(root, key)
    if not exists(tombstone_of(root, key)):
        return
    if exists(directory):
        if not (is_gone or _is_gone)(directory):
            raise StillRunsError(f"job {key} is being ended and still runs")
        if not exists(os.path.join(directory, "group")):
            shutil.rmtree(directory, ignore_errors=True)
    raise AlreadyEndedError(f"job {key} has ended already; it is not started again")


def _folder(root: str, name: str) -> str:
    return os.path.abspath(os.path.join(os.path.expanduser(root), name))


def tombstone_of(root: str, key: str) -> str:
    return os.path.join(_folder(root, ENDED), _name(key))


def told_file_of(root: str, key: str) -> str:
    return os.path.join(_folder(root, TOLD), _name(key))


def jobs_in(root: str) -> Iterator[str]:
    """Yield the keys of the jobs that have a directory."""
    with suppress(FileNotFoundError), os.scandir(os.path.expanduser(root)) as entries:
        for entry in entries:
            if entry.is_dir() and entry.name not in (KEPT, ENDED, TOLD) and KEY.fullmatch(entry.name):
                yield entry.name


def ended_in(root: str) -> Iterator[str]:
    """Yield the keys of the jobs that have a tombstone."""
    with suppress(FileNotFoundError):
        yield from os.listdir(_folder(root, ENDED))


def _mark(folder: str) -> str:
    """Return the number that only this folder has; whichever process comes first writes it."""
    path = os.path.join(folder, "mark")
    with closing(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mark = file.read()
        if not mark:
            mark = os.urandom(16).hex()
            file.write(mark)
            file.flush()
            os.fsync(file.fileno())
    return mark


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # an account without a name, as in containers
        return str(os.geteuid())


def exists(path: str) -> bool:
    """Return whether there is such a file; raises `OSError` if it cannot be known."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _open(path: str) -> BinaryIO:
    """Open a regular file to read it; raises `FileNotFoundError` for a link, a pipe, a device or a socket."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise FileNotFoundError(errno.ENOENT, "no regular file", path) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `fdopen` refuses a folder
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file", path)
    return os.fdopen(descriptor, "rb")


def text_of(path: str) -> str:
    """Return what a short file says."""
    with _open(path) as file:
        return file.read(MAX_SHORT_BYTES).decode("ascii", "replace")


def whole_text_of(path: str) -> str:
    """Return what a file of at most `LOG_CHUNK_BYTES` says."""
    with _open(path) as file:
        return file.read(LOG_CHUNK_BYTES).decode("utf-8", "replace")


def write_file(path: str, text: str, dated: float | None = None) -> None:
    """Write a file that no reader sees half, in place of what is there; `dated` is when it was changed."""
    new = f"{path}.{os.urandom(4).hex()}"  # a name of its own: others may write the same file now
    try:
        with open(new, "x") as file:
            file.write(text)
        if dated is not None:
            os.utime(new, (dated, dated))
        os.replace(new, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(new)
        raise


def directory_of(root: str, key: str) -> str:
    return os.path.abspath(os.path.join(os.path.expanduser(root), _name(key)))


def _name(key: str) -> str:
    """Return the key; raises `ElsewhereError` for one that would lead out of the folder."""
    if not KEY.fullmatch(key):
        raise ElsewhereError(f"no job is called {key[:60]!r}")
    return key


def own_directory_of(root: str, key: str) -> str:
    """Return the directory of all leases of the same id and rank: the key without the fencing token."""
    lease = re.sub(r"-\d+(\.\d+)?$", lambda found: found[1] or "", key)
    return os.path.abspath(os.path.join(os.path.expanduser(root), KEPT, lease))


def modified_at(path: str) -> float | None:
    """Return the time of a file; None if it has none, or one that a job has set and nobody takes."""
    with suppress(OSError):
        at = os.stat(path).st_mtime
        return at if 0 <= at <= MAX_TIME_S else None
    return None


def write_grace(path: str, grace_s: float) -> None:
    """Write the file that tells a job its grace, an empty one on a full disk."""
    try:
        write_file(path, f"{grace_s:g}\n")
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        write_file(path, "")


def _signal(directory: str, signal_number: int) -> bool:
    """Signal the job's process group, if it exists, and with SIGKILL also processes that left the group.

    Returns whether the group exists.
    """
    group = None
    with suppress(IsADirectoryError):
        group = number_in(directory, "group")
    if group is not None and (group <= 1 or group == os.getpgrp()):
        group = None  # the job wrote it, to end others
    if group is not None:
        if signal_number != signal.SIGKILL:
            # Between a shell's fork and its program's start a signal is lost: the job lasts for its grace.
            age_s = time.time() - (modified_at(os.path.join(directory, "group")) or 0.0)
            time.sleep(min(max(BEGINNING_S - age_s, 0.0), BEGINNING_S))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal_number)
    if signal_number == signal.SIGKILL:
        for process in _processes(directory):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal_number)
    return group is not None


def _processes(directory: str) -> Iterator[int]:
    """Yield the ids of the job's processes, found by its lock or their environment; none without /proc."""
    path = os.path.join(directory, "lock")
    try:
        wanted = os.stat(path)
    except FileNotFoundError:  # another process has just stopped the job
        return
    mark = os.fsencode(f"GPU_JOB_LOCK={path}")
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        if int(process) == os.getpid():
            continue
        with suppress(OSError):
            with open(f"/proc/{process}/environ", "rb") as environment:
                if mark in environment.read().split(b"\0"):
                    yield int(process)
                    continue
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    found = os.stat(f"/proc/{process}/fd/{descriptor}")
                    if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino) and _is_inherited(
                        process, descriptor
                    ):
                        yield int(process)
                        break


def _marked(folder: str) -> set[str]:
    """Return the jobs of this folder that processes of the machine name in their environment."""
    lock = re.escape(os.fsencode(folder)) + rb"/([^/\0]+)/lock"
    mark = re.compile(rb"(?:\A|\0)GPU_JOB_LOCK=" + lock + rb"(?:\Z|\0)")
    found: set[str] = set()
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with suppress(OSError), open(f"/proc/{process}/environ", "rb") as environment:
            found.update(map(os.fsdecode, mark.findall(environment.read())))
    return found


def _is_inherited(process: str, descriptor: str) -> bool:
    """Return whether programs that the process starts get this descriptor: those that test a lock keep it."""
    flags = next(
        line for line in text_of(f"/proc/{process}/fdinfo/{descriptor}").splitlines() if "flags" in line
    )
    return not int(flags.split()[1], 8) & os.O_CLOEXEC


@contextmanager
def _locked(directory: str, mode: int, create: int = 0) -> Iterator[int | None]:
    """Yield the lock's descriptor, or None while another process holds it.

    A test of the lock shares it (LOCK_SH), a start does not (LOCK_EX) and makes the file.
    """
    descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | create, 0o600)
    try:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def lock_of_unstarted(
    directory: str, names: Sequence[str] = ("group",), timeout_s: float = STARTER_TIMEOUT_S
) -> Iterator[int | None]:
    """Yield the lock's descriptor of a job that was not started, None if it was; raises `RuntimeError`.

    A job that was started has one of the files of these names.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with _locked(directory, fcntl.LOCK_EX, os.O_CREAT) as lock:
            was_started = any(exists(os.path.join(directory, name)) for name in names)
            if was_started or lock is not None:
                yield None if was_started else lock
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"another process holds {directory}/lock and does not start the job")
        time.sleep(0.02)  # another process tests the lock or is starting the job


def _is_free(directory: str) -> bool:
    try:
        with _locked(directory, fcntl.LOCK_SH) as lock:
            return lock is not None
    except FileNotFoundError:  # not started, or another process has just stopped the job
        return True


def _is_gone(directory: str) -> bool:
    return _is_free(directory) and not any(_processes(directory))


class Lookout:
    """A look at many jobs of a root: which have ended, and whose output grew, that at most once a second."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._directories: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._grown_at = 0.0

    def watch(self, key: str) -> None:
        """Tell of this job from now on, until it has ended."""
        self._directories[key] = directory_of(self._root, key)

    def forget(self, key: str) -> None:
        self._directories.pop(key, None)
        self._sizes.pop(key, None)

    def changed(self) -> list[str]:
        """Return the jobs that have changed since the last look; of one that has ended no more is told."""
        now = time.monotonic()
        looks_at_logs = now - self._grown_at >= GROWTH_EVERY_S
        found = []
        for key, directory in list(self._directories.items()):
            # One that was killed, or removed, has no exit code.
            if exists(f"{directory}/exit_code") or (looks_at_logs and _is_free(directory)):
                self.forget(key)
                found.append(key)
            elif looks_at_logs and self._has_grown(key, directory):
                found.append(key)
        if looks_at_logs:
            self._grown_at = now
        return found

    def _has_grown(self, key: str, directory: str) -> bool:
        before = self._sizes.get(key, 0)
        with suppress(OSError):
            self._sizes[key] = os.stat(f"{directory}/log").st_size
        return self._sizes.get(key, 0) != before


def number_in(directory: str, name: str) -> int | None:
    try:
        number = int(text_of(os.path.join(directory, name)))
    except (FileNotFoundError, ValueError):
        return None
    return number if abs(number) < 2**31 else None


ACTS = (prepare, start, stage, status, logs, tail, terminate, preempt, stop, running, sign)


def answer(
    call: dict[str, Any],
    acts: Sequence[Callable[..., Any]] = ACTS,
    here: Callable[[], str] = machine,
) -> None:
    """Execute a remote call {"do": name, "place": its place or None, ...arguments}; print a line of JSON.

    It is {"refused": class of the error, "reason": its text} for a `RefusedError`.
    """
    by_name = {act.__name__: act for act in acts}
    act, place = by_name[call.pop("do")], call.pop("place")
    try:
        if place is not None:
            verify(call.get("key", ANY), place, here())
        found = act(**call) or {}
    except RefusedError as error:
        found = {"refused": type(error).__name__, "reason": str(error)}
    print("\n" + json.dumps(found))


def attend_or_say(place: Mapping[str, str], **call: Any) -> int:
    """Return what `attend` returns at that place, 126 if it did not start the job: a line says why."""
    try:
        verify(call["key"], place)
        return attend(**call)
    except (RefusedError, OSError, RuntimeError) as error:
        print(f"gpu-manager: {error}", file=sys.stderr)
        return 126
