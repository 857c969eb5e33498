"""Detached jobs with a directory each; standard library only, since the ssh launcher sends this file along.

`<root>/<key>/` holds `log`, `group` (the process group), `exit_code` once the job has ended, `lock`, and
`preempted` once the job was told that its lease is taken. `<root>/kept/<key without its lease's fencing
token>/` is the job's own: it stays for the next lease of the same id, until a job has succeeded.
Every process of the job inherits a flock on `lock`, so the lock is free only when the job is gone, even if
some of its processes were killed or process ids were reused. A process that closed the inherited
descriptor, as Python's subprocesses do, is found by `GPU_JOB_LOCK` in its environment when the job is
stopped.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

DEFAULT_ROOT = "~/.gpu-manager/jobs"
CHECKPOINT = "checkpoint"
PREEMPTED = "preempted"
LOG_CHUNK_BYTES = 256 * 1024
STARTER_TIMEOUT_S = 10.0
ENDING = (signal.SIGTERM, signal.SIGHUP)

# The outer shell exits at once, so that the job has no parent here. If it cannot write `group`, as on a full
# disk, it starts nothing, since a job without this file would be started twice. The inner shell writes the
# exit code; it traps the signals that end the job, and a trapped signal is reset to its default in children.
WRAPPER = """
echo $$ > group.new && mv group.new group || exit
(
    trap : TERM INT HUP USR2
    directory=$PWD
    cd "$GPU_JOB_WORKING_DIR" && "$@"
    echo $? > "$directory/exit_code.new" && mv "$directory/exit_code.new" "$directory/exit_code"
) > log 2>&1 &
"""


def prepare(root: str, key: str, port: int = 0) -> dict[str, Any]:
    """Make the job's directory and test that a start can write there and that `port`, if any, is free.

    Returns {"running": the other jobs of this root that run}. Raises `OSError`.
    """
    directory = _directory(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.path.join(directory, "prepared"), "w") as file:
        file.write("1\n")
    if port:
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections take no port
            try:
                probe.bind(("", port))
            except OSError as error:
                raise OSError(f"port {port} cannot be bound: {error.strerror}") from error
    others = [name for name in os.listdir(os.path.dirname(directory)) if name not in (key, "kept")]
    return {"running": [name for name in others if status(root, name)["state"] == "running"]}


def start(
    root: str,
    key: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    working_dir: str = ".",
    files: Mapping[str, str] | None = None,
) -> None:
    """Start `command` in a new session, unless this job was started before; raises `RuntimeError`.

    Each of the variables in `files` has the path of a file with the text given there.
    """
    directory = _directory(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    paths = {variable: os.path.join(directory, variable.lower()) for variable in files or {}}
    own = _own_directory(root, key)
    os.makedirs(own, mode=0o700, exist_ok=True)
    deadline = time.monotonic() + STARTER_TIMEOUT_S
    while not os.path.exists(os.path.join(directory, "group")):
        with _locked(directory, fcntl.LOCK_EX) as lock:
            if lock is not None:
                for variable, path in paths.items():
                    with open(path, "w") as file:
                        file.write((files or {})[variable])
                started = subprocess.run(
                    ["/bin/sh", "-c", WRAPPER, "sh", *command],
                    cwd=directory,
                    env={
                        **os.environ,
                        **environment,
                        **paths,
                        "GPU_JOB_DIR": own,
                        "GPU_CHECKPOINT_FILE": os.path.join(own, CHECKPOINT),
                        "GPU_PREEMPT_FILE": os.path.join(directory, PREEMPTED),
                        "GPU_JOB_WORKING_DIR": os.path.abspath(working_dir),
                        "GPU_JOB_LOCK": os.path.join(directory, "lock"),
                    },
                    stdin=subprocess.DEVNULL,
                    pass_fds=(lock,),
                    start_new_session=True,
                    stderr=subprocess.PIPE,
                )
                if started.returncode != 0:
                    reason = started.stderr.decode("utf-8", "replace").strip()
                    raise RuntimeError(f"{directory} cannot be written: {reason}")
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"another process holds {directory}/lock and does not start the job")
        time.sleep(0.02)  # another process tests the lock or is starting the job


class Ended(BaseException):
    """SIGTERM or SIGHUP came: the caller of `attend` wants the job to end, or is gone."""


def attend(
    root: str, key: str, command: Sequence[str], environment: Mapping[str, str], working_dir: str = "."
) -> int:
    """Run `command` in this process's terminal; return its exit code, 128 + n if signal n ended it.

    All its processes end with it, and when this process gets SIGTERM or SIGHUP, as it does when its parent
    dies: then the exit code is 143. Raises `RuntimeError` if this job was started before.
    """
    directory = _directory(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    # Held back while the job starts: one that came between would leave it behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in ENDING:
        signal.signal(number, _ended)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG
    terminal = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)
    with _locked(directory, fcntl.LOCK_EX) as lock:
        if lock is None or os.path.exists(os.path.join(directory, "group")):
            raise RuntimeError(f"job {key} was started before")

        def own_group() -> None:
            os.setpgid(0, 0)
            with open(os.path.join(directory, "group"), "w") as file:
                file.write(str(os.getpid()))
            if terminal is not None:
                os.tcsetpgrp(terminal, os.getpid())
            for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTTOU, *ENDING):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

        lock_path = os.path.join(directory, "lock")
        try:
            job = subprocess.Popen(
                command,
                cwd=os.path.expanduser(working_dir),
                env={**os.environ, **environment, "GPU_JOB_LOCK": lock_path},
                pass_fds=(lock,),
                preexec_fn=own_group,
            )
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            return 127 if isinstance(error, FileNotFoundError) else 126
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        code = _wait(job.pid)
        _ignore_ending()
    except Ended:
        code = 128 + signal.SIGTERM
    if terminal is not None:
        with suppress(OSError):  # the terminal is gone
            os.tcsetpgrp(terminal, os.getpgrp())
    terminate(root, key)
    with suppress(OSError), open(os.path.join(directory, "exit_code"), "w") as file:
        file.write(str(code))
    return code


def _ended(number: int, frame: Any) -> None:
    _ignore_ending()  # a hang-up comes twice: of the terminal, and of the parent's death
    raise Ended


def _ignore_ending() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _wait(process: int) -> int:
    """Return the exit code of a child; one that Ctrl-Z stopped goes on, since its lease would be idle."""
    while True:
        _, status = os.waitpid(process, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.killpg(process, signal.SIGCONT)
        elif os.WIFSIGNALED(status):
            return 128 + os.WTERMSIG(status)
        else:
            return os.WEXITSTATUS(status)


def status(root: str, key: str) -> dict[str, Any]:
    """Return {"state": absent | running | finished, "exit_code": number, "ended_at": time}, or None for both.

    `ended_at`, and `checkpoint_at` of the last checkpoint or None, are in seconds since the epoch, by the
    server's clock. `preempted`: the job was told that its lease is taken.
    """
    directory = _directory(root, key)
    found: dict[str, Any] = {
        "state": "absent",
        "exit_code": None,
        "ended_at": None,
        "checkpoint_at": _modified_at(os.path.join(_own_directory(root, key), CHECKPOINT)),
        "preempted": os.path.exists(os.path.join(directory, PREEMPTED)),
    }
    if not os.path.isdir(directory):
        return found
    gone = _is_free(directory)
    exit_code = _number(directory, "exit_code")
    if exit_code is None and not gone:
        return {**found, "state": "running"}
    if exit_code is None and _number(directory, "group") is None:
        return found
    # A killed job writes no exit code.
    ended_at = _modified_at(os.path.join(directory, "exit_code"))
    return {**found, "state": "finished", "exit_code": exit_code, "ended_at": ended_at}


def logs(root: str, key: str, offset: int = 0) -> dict[str, Any]:
    """Return {"text": the output from byte `offset` on, "offset": the next one, "status": as `status` says}.

    It ends with a whole line, unless a line exceeds `LOG_CHUNK_BYTES` or the job has ended: a job that
    buffers its output leaves half a line until its buffer is full again or it ends.
    """
    found = status(root, key)  # read before the log, so that all output of a job that has ended is there
    try:
        with open(os.path.join(_directory(root, key), "log"), "rb") as log:
            log.seek(offset)
            data = log.read(LOG_CHUNK_BYTES)
    except FileNotFoundError:
        return {"text": "", "offset": offset, "status": found}
    whole = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]  # a progress bar ends its lines with \r
    data = whole or (data if found["state"] != "running" or len(data) == LOG_CHUNK_BYTES else b"")
    return {"text": data.decode("utf-8", "replace"), "offset": offset + len(data), "status": found}


def tail(root: str, key: str, size: int) -> dict[str, Any]:
    """Return the last `size` bytes of the output."""
    try:
        with open(os.path.join(_directory(root, key), "log"), "rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - size, 0))
            return {"text": log.read(size).decode("utf-8", "replace")}
    except FileNotFoundError:
        return {"text": ""}


def terminate(root: str, key: str, grace_s: float = 10.0) -> None:
    """End every process of the job; its directory stays.

    SIGTERM comes first, SIGKILL after `grace_s`; with a grace of 0, SIGKILL alone. Raises `RuntimeError` if a
    process survives SIGKILL.
    """
    directory = _directory(root, key)
    if not os.path.isdir(directory):
        return
    # A SIGTERM just before SIGKILL would only run a handler that was done, or leave it in its middle.
    steps = ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0))
    for signal_number, timeout_s in steps if grace_s > 0 else steps[1:]:
        deadline = time.monotonic() + timeout_s
        signalled = False
        while not (_is_free(directory) and not any(_processes(directory))):
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
    directory = _directory(root, key)
    told = os.path.join(directory, PREEMPTED)
    if status(root, key)["state"] == "running" and not os.path.exists(told):
        _write_grace(told + ".new", grace_s)
        os.replace(told + ".new", told)
        _signal(directory, getattr(signal, f"SIG{signal_name}"))
    deadline = time.monotonic() + wait_s
    while (found := status(root, key))["state"] == "running":
        kill_at = _kill_at(told)
        if kill_at is not None and time.time() >= kill_at:
            terminate(root, key, 0.0)
        elif time.monotonic() >= deadline:
            return found
        else:
            time.sleep(0.05)
    terminate(root, key, 0.0)  # what it left behind, such as a process in the background
    return found


def stop(root: str, key: str, grace_s: float = 10.0) -> None:
    """End the job as `terminate` does, and remove its directory; raises `RuntimeError`."""
    terminate(root, key, grace_s)
    if _number(_directory(root, key), "exit_code") == 0:  # nothing has to go on from there
        shutil.rmtree(_own_directory(root, key), ignore_errors=True)
    shutil.rmtree(_directory(root, key), ignore_errors=True)


def _directory(root: str, key: str) -> str:
    return os.path.abspath(os.path.join(os.path.expanduser(root), key))


def _own_directory(root: str, key: str) -> str:
    """Return the directory of all leases of the same id and rank: the key without the fencing token."""
    lease = re.sub(r"-\d+(\.\d+)?$", lambda found: found[1] or "", key)
    return os.path.abspath(os.path.join(os.path.expanduser(root), "kept", lease))


def _modified_at(path: str) -> float | None:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return None


def _write_grace(told: str, grace_s: float) -> None:
    """Write the file that tells a job its grace; on a full disk an empty one, dated to its end."""
    try:
        with open(told, "w") as file:
            file.write(f"{grace_s:g}\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        ends_at = time.time() + grace_s
        os.utime(told, (ends_at, ends_at))


def _kill_at(told: str) -> float | None:
    """Return when the grace is over that the file gives the job, None if the job was not told."""
    with suppress(FileNotFoundError), open(told) as file:
        return os.fstat(file.fileno()).st_mtime + float(file.read() or 0)
    return None


def _signal(directory: str, signal_number: int) -> bool:
    """Signal the job's process group, if it exists, and with SIGKILL also processes that left the group.

    Returns whether the group exists.
    """
    group = _number(directory, "group")
    if group is not None:
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
                    if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                        yield int(process)
                        break


@contextmanager
def _locked(directory: str, mode: int) -> Iterator[int | None]:
    """Yield the lock's descriptor, or None while another process holds it.

    A test of the lock shares it (LOCK_SH), a start does not (LOCK_EX).
    """
    descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _is_free(directory: str) -> bool:
    try:
        with _locked(directory, fcntl.LOCK_SH) as lock:
            return lock is not None
    except FileNotFoundError:  # another process has just stopped the job
        return True


def _number(directory: str, name: str) -> int | None:
    try:
        with open(os.path.join(directory, name)) as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def answer(call: dict[str, Any]) -> None:
    """Execute a remote call {"do": name, ...arguments} and print the answer as a line of JSON."""
    acts = (prepare, start, status, logs, tail, terminate, preempt, stop)
    by_name: dict[str, Any] = {act.__name__: act for act in acts}
    print("\n" + json.dumps(by_name[call.pop("do")](**call) or {}))
