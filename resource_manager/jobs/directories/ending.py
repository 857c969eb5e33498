"""Ends of jobs: by signals, after the grace of a preemption, and for good, with a tombstone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from resource_manager.jobs.directories import job_files
from resource_manager.jobs.directories.job_processes import group_of, know_group, processes_of
from resource_manager.jobs.directories.job_states import status

BEGINNING_S = 0.2
KILL_TIMEOUT_S = 10.0
EXIT_S = 2.0
"""Time for a process that has noted its job's exit code to end, and to return it to who waits for that."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_gone(directory: str) -> bool:
    return job_files.is_free(directory) and not any(processes_of(directory))


def send_signal(directory: str, signal_number: int) -> bool:
    """Signal the job's process group, if it exists, and with SIGKILL also processes that left the group.

    Returns whether the group exists.
    """
    group = group_of(directory)
    if group is not None and signal_number != signal.SIGKILL:
        # Between a shell's fork and its program's start a signal is lost: the job lasts for its grace.
        age_s = time.time() - (job_files.modified_at(os.path.join(directory, "group")) or 0.0)
        time.sleep(min(max(BEGINNING_S - age_s, 0.0), BEGINNING_S))
    processes = [*processes_of(directory)]
    is_there = group is not None and (
        not os.path.isdir("/proc") or any(_is_in(group, process) for process in processes)
    )
    if group is not None and is_there:
        know_group(directory)  # a process that a driver keeps from its end has maybe no mark
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal_number)
    if signal_number == signal.SIGKILL:
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal_number)
    return is_there


def _is_in(group: int, process: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(process) == group
    return False


def terminate(root: str, key: str, grace_s: float = 10.0) -> None:
    """End every process of the job; its directory stays.

    SIGTERM comes first, SIGKILL after `grace_s`; with a grace of 0, SIGKILL alone. Raises `RuntimeError` if a
    process survives SIGKILL.
    """
    directory = job_files.directory_of(root, key)
    # A SIGTERM just before SIGKILL would only run a handler that was done, or leave it in its middle.
    steps = ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S))
    for signal_number, timeout_s in steps if grace_s > 0 else steps[1:]:
        deadline = time.monotonic() + timeout_s
        signalled = False
        while not is_gone(directory):
            # A second SIGTERM may interrupt a checkpoint.
            if not signalled or signal_number == signal.SIGKILL:
                signalled = send_signal(directory, signal_number)
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
        send_signal(job_files.directory_of(root, key), getattr(signal, f"SIG{signal_name}"))

    found = tell_and_end(root, key, grace_s, wait_s, 0.05, tell, status, terminate)
    if found["state"] != "running":
        terminate(root, key, EXIT_S)  # what it left behind, such as a process in the background
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
    told = job_files.told_file_of(root, key)
    if status(root, key)["state"] == "running" and not job_files.exists(told):
        _note_end_of_grace(root, key, time.time() + grace_s)
        with suppress(OSError):  # another process has just stopped the job, or it put a folder there
            write_grace(os.path.join(job_files.directory_of(root, key), job_files.PREEMPTED), grace_s)
        tell()
    deadline = time.monotonic() + wait_s
    found = status(root, key)
    while found["state"] == "running":
        kill_at = job_files.modified_at(told)
        if kill_at is not None and time.time() >= kill_at:
            terminate(root, key, 0.0)
        elif time.monotonic() >= deadline:
            break
        else:
            time.sleep(poll_s)
        found = status(root, key)
    return found


def _note_end_of_grace(root: str, key: str, at: float) -> None:
    told = job_files.told_file_of(root, key)
    os.makedirs(os.path.dirname(told), mode=0o700, exist_ok=True)
    try:
        job_files.write_file(told, "", dated=at)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        with suppress(FileNotFoundError):  # else it is there since before the job could fill the disk
            prepared = os.path.join(job_files.directory_of(root, key), job_files.PREPARED)
            os.utime(prepared, (at, at), follow_symlinks=False)
            os.replace(prepared, told)
            return
        raise


def write_grace(path: str, grace_s: float) -> None:
    """Write the file that tells a job its grace, an empty one on a full disk."""
    try:
        job_files.write_file(path, f"{grace_s:g}\n")
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        job_files.write_file(path, "")


def stop(root: str, key: str, grace_s: float = 10.0, keep: bool = False) -> dict[str, Any]:
    """End the job as `terminate` does, and remove its directory; return {"ran": whether it ran until then}.

    With `keep` the directory stays. Its tombstone comes first, also where no job was, so that a start that
    comes later starts nothing. Raises `RuntimeError`.
    """
    ran = False
    with suppress(OSError):  # the job put something else there
        ran = status(root, key)["state"] == "running"
    bury(root, key, grace_s, terminate)
    terminate(root, key, grace_s)
    if not keep:
        remove(root, key)
    return {"ran": ran}


def bury(root: str, key: str, grace_s: float, terminate: Callable[[str, str, float], None]) -> None:
    """Write the job's tombstone; where it has left no room for that, end it by this function before."""
    try:
        job_files.bury(root, key)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        terminate(root, key, grace_s)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(job_files.directory_of(root, key), "log"))
        job_files.bury(root, key)


def remove(root: str, key: str) -> None:
    """Remove the files of a job that is gone, with its own directory if it has succeeded or saved nothing."""
    directory, own = job_files.directory_of(root, key), job_files.own_directory_of(root, key)
    others = (name for name in job_files.jobs_in(root) if name != key)
    with suppress(OSError):  # the job put something else there, or has something to go on from
        if own not in (job_files.own_directory_of(root, name) for name in others):
            if job_files.number_of(f"{directory}/exit_code") == 0:
                shutil.rmtree(own, ignore_errors=True)
            else:
                os.rmdir(own)
    shutil.rmtree(directory, ignore_errors=True)
    for path in (job_files.told_file_of(root, key), job_files.begun_file_of(root, key)):
        with suppress(FileNotFoundError):
            os.unlink(path)


def refuse_ended(root: str, key: str, is_gone: Callable[[str], bool] = is_gone) -> None:
    """Raise `AlreadyEndedError` if the job was stopped, `StillRunsError` while it is being stopped.

    A folder without a job is removed: a start that came too late had made it again. `is_gone` says of a
    job's directory whether its processes are gone.
    """
    job_files.prune_tombstones(root)
    directory = job_files.directory_of(root, key)
    if not job_files.exists(job_files.tombstone_of(root, key)):
        return
    if job_files.exists(directory):
        if not is_gone(directory):
            raise job_files.StillRunsError(f"job {key} is being ended and still runs")
        if not job_files.exists(os.path.join(directory, "group")):
            shutil.rmtree(directory, ignore_errors=True)
    raise job_files.AlreadyEndedError(f"job {key} has ended already; it is not started again")
