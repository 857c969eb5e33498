"""A detached job kept in a directory; standard library only, since the ssh launcher sends this file along.

`<root>/<key>/` holds `log`, `group` (the process group), `exit_code` once it ended, and `lock`: every
process of the job inherits a flock on it, so the lock is free only when the job is really gone, whoever
of its processes was killed, and whatever process number was used again since. A process that closed what it
inherited, as Python's subprocesses do, is found by `GPU_JOB_LOCK` in its environment when the job is stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

DEFAULT_ROOT = "~/.gpu-manager/jobs"
LOG_CHUNK_BYTES = 256 * 1024
STARTER_PATIENCE_S = 10.0

# The outer shell leaves at once, so that the job has no parent here; on a full disk it starts nothing, since
# a job without its mark would be started twice. The inner one notes how the job ended; it outlives the
# signals that end the job, since a trapped signal is the default one for its children.
WRAPPER = """
echo $$ > group.new && mv group.new group || exit
(
    trap : TERM INT HUP
    directory=$PWD
    cd "$GPU_JOB_WORKING_DIR" && "$@"
    echo $? > "$directory/exit_code.new" && mv "$directory/exit_code.new" "$directory/exit_code"
) > log 2>&1 &
"""


def start(
    root: str, key: str, command: Sequence[str], environment: Mapping[str, str], working_dir: str = "."
) -> None:
    """Starts `command` in a session of its own, unless this job was started before."""
    directory = _directory(root, key)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    deadline = time.monotonic() + STARTER_PATIENCE_S
    while not os.path.exists(os.path.join(directory, "group")):
        with _locked(directory, fcntl.LOCK_EX) as lock:
            if lock is not None:
                started = subprocess.run(
                    ["/bin/sh", "-c", WRAPPER, "sh", *command],
                    cwd=directory,
                    env={
                        **os.environ,
                        **environment,
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
            raise RuntimeError(f"another process holds {directory}/lock and starts nothing")
        time.sleep(0.02)  # someone looks at the lock, or starts the job right now


def status(root: str, key: str) -> dict[str, Any]:
    """{"state": absent | running | finished, "exit_code": number or None}."""
    directory = _directory(root, key)
    if not os.path.isdir(directory):
        return {"state": "absent", "exit_code": None}
    gone = _is_free(directory)
    exit_code = _number(directory, "exit_code")
    if exit_code is None and not gone:
        return {"state": "running", "exit_code": None}
    if exit_code is None and _number(directory, "group") is None:
        return {"state": "absent", "exit_code": None}
    return {"state": "finished", "exit_code": exit_code}


def logs(root: str, key: str, offset: int = 0) -> dict[str, Any]:
    """The output from byte `offset` on, and where to go on: whole lines, unless one is too long or the last.

    A job that buffers its output leaves half a line here until its buffer is full again, or it ends.
    """
    over = status(root, key)["state"] != "running"  # before the reading: what is read now is then the last
    try:
        with open(os.path.join(_directory(root, key), "log"), "rb") as log:
            log.seek(offset)
            data = log.read(LOG_CHUNK_BYTES)
    except FileNotFoundError:
        return {"text": "", "offset": offset}
    whole = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]  # progress bars end their lines with \r
    data = whole or (data if over or len(data) == LOG_CHUNK_BYTES else b"")
    return {"text": data.decode("utf-8", "replace"), "offset": offset + len(data)}


def stop(root: str, key: str, grace_s: float = 10.0) -> None:
    """Ends every process of the job and removes its directory; raises if one cannot be killed."""
    directory = _directory(root, key)
    if not os.path.isdir(directory):
        return
    for signal_number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience_s
        signalled = False
        while not (_is_free(directory) and not any(_processes(directory))):
            if not signalled or signal_number == signal.SIGKILL:  # two SIGTERM would end the saving of work
                signalled = _signal(directory, signal_number)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        else:
            shutil.rmtree(directory, ignore_errors=True)
            return
    raise RuntimeError(f"the processes of job {key} survive SIGKILL")


def _directory(root: str, key: str) -> str:
    return os.path.abspath(os.path.join(os.path.expanduser(root), key))


def _signal(directory: str, signal_number: int) -> bool:
    """Signals the job's group, if it is known yet, and kills those of its processes that left the group."""
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
    """The job's processes, by its lock or their environment; none where there is no /proc to see them in."""
    path = os.path.join(directory, "lock")
    try:
        wanted = os.stat(path)
    except FileNotFoundError:  # someone else stopped the job just now
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
    """The lock's descriptor, or None while someone holds it; looking shares it, starting does not."""
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
    except FileNotFoundError:  # someone else stopped the job just now
        return True


def _number(directory: str, name: str) -> int | None:
    try:
        with open(os.path.join(directory, name)) as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def answer(call: dict[str, Any]) -> None:
    """Does what a remote caller asks, {"do": name, ...arguments}, and prints the answer as JSON, a line."""
    acts: dict[str, Any] = {"start": start, "status": status, "logs": logs, "stop": stop}
    print("\n" + json.dumps(acts[call.pop("do")](**call) or {}))
