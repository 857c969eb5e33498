"""What is known of jobs: whether they run, their output, and which of many have changed."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import Any

from resource_manager.jobs.directories import job_files
from resource_manager.jobs.directories.job_files import folder_of
from resource_manager.jobs.directories.job_processes import has_group, processes_of

GROWTH_EVERY_S = 1.0


def status(root: str, key: str) -> dict[str, Any]:
    """Return {"state": absent | running | finished, "exit_code": number, "ended_at": time}, or None for both.

    `ended_at`, and `checkpoint_at` of the last checkpoint or None, are in seconds since the epoch, by the
    server's clock. `preempted`: the job was told that its lease is taken.
    """
    directory = job_files.directory_of(root, key)
    found = unstarted(root, key)
    gone = job_files.is_free(directory)
    exit_code = job_files.number_of(f"{directory}/exit_code")
    if exit_code is None and not gone:
        return {**found, "state": "running"}
    if exit_code is None and not job_files.exists(os.path.join(directory, "group")):
        if any(processes_of(directory)):  # somebody has removed its directory
            return {**found, "state": "running"}
        if not job_files.exists(job_files.begun_file_of(root, key)):
            return found
    # A killed job writes no exit code.
    ended_at = job_files.modified_at(os.path.join(directory, "exit_code"))
    return {**found, "state": "finished", "exit_code": exit_code, "ended_at": ended_at}


def unstarted(root: str, key: str) -> dict[str, Any]:
    """Return the status of a job that was not started."""
    own = job_files.own_directory_of(root, key)
    return {
        "state": "absent",
        "exit_code": None,
        "ended_at": None,
        "checkpoint_at": job_files.modified_at(f"{own}/{job_files.CHECKPOINT}"),
        "preempted": job_files.exists(job_files.told_file_of(root, key)),
    }


def running(root: str, user: str = "") -> dict[str, Any]:
    """Return {"running": the jobs of this root of which a process is left}.

    Raises `ElsewhereError` where the root was never used, or this is not that user: nothing is known there.
    """
    folder = folder_of(root, user)
    marked = marked_in(folder)
    directories = {key: os.path.join(folder, key) for key in job_files.jobs_in(folder)}
    others = (
        key
        for key, directory in directories.items()
        if key not in marked
        and (not job_files.is_free(directory) or (has_group(directory) and any(processes_of(directory))))
    )
    return {"running": [*sorted(marked), *others]}  # also of those whose directory somebody has removed


def logs(root: str, key: str, offset: int = 0) -> dict[str, Any]:
    """Return {"text": the output from byte `offset` on, "offset": the next one, "status": as `status` says}.

    "is_all": there was no more than that.
    It ends with a whole line, unless a line exceeds `LOG_CHUNK_BYTES` or the job has ended: a job that
    buffers its output leaves half a line until its buffer is full again or it ends.
    """
    found = status(root, key)  # read before the log, so that all output of a job that has ended is there
    return {**log_from(root, key, offset, found["state"] == "running"), "status": found}


def log_from(
    root: str, key: str, offset: int, is_running: bool, size: int = job_files.LOG_CHUNK_BYTES
) -> dict[str, Any]:
    """Return "text", "offset" and "is_all" as `logs` does, of at most `size` bytes."""
    try:
        with job_files.open_regular(os.path.join(job_files.directory_of(root, key), "log")) as log:
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
        with job_files.open_regular(os.path.join(job_files.directory_of(root, key), "log")) as log:
            log.seek(max(os.fstat(log.fileno()).st_size - size, 0))
            return {"text": log.read(size).decode("utf-8", "replace")}
    except FileNotFoundError:
        return {"text": ""}


class Lookout:
    """A look at many jobs of a root: which have ended, and whose output grew, that at most once a second."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._directories: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._grown_at = 0.0

    def watch(self, key: str) -> None:
        """Tell of this job from now on, until it has ended."""
        self._directories[key] = job_files.directory_of(self._root, key)

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
            if job_files.exists(f"{directory}/exit_code") or (looks_at_logs and job_files.is_free(directory)):
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


def marked_in(folder: str) -> set[str]:
    """Return the jobs of this folder that processes of the machine name in their environment."""
    lock = re.escape(os.fsencode(folder)) + rb"/([^/\0]+)/lock"
    mark = re.compile(rb"(?:\A|\0)GPU_JOB_LOCK=" + lock + rb"(?:\Z|\0)")
    found: set[str] = set()
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with suppress(OSError), open(f"/proc/{process}/environ", "rb") as environment:
            found.update(map(os.fsdecode, mark.findall(environment.read())))
    return found
