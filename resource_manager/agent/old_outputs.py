"""Folders of jobs that are over: for how long an agent keeps them, and how much of the disk they may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from resource_manager.jobs.directories import ending, job_files

KEEP_LOGS_S = 3 * 86400.0
MAX_LOGS_BYTES = 4 * 2**30
KEEP_UNBEGUN_S = 3600.0


def remove_old(root: str, over: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]) -> None:
    """Remove the folders of jobs that are over and that nobody wants here any more, by age, then by size.

    The states are by key. Of a job whose end no service knows the output alone goes, after all others, and
    never by age: without its exit code it would be begun again, or be taken for one that did not start.
    """
    folders = sorted((not state["ended"], _ended_at(root, key, state), key) for key, state in over.items())
    left = sum(_size(job_files.directory_of(root, key)) for _, _, key in folders)
    for is_untold, ended_at, key in folders:
        if left <= MAX_LOGS_BYTES and (is_untold or ended_at >= time.time() - KEEP_LOGS_S):
            continue
        folder = job_files.directory_of(root, key)
        size = _size(folder)
        if is_untold:
            try:
                os.unlink(os.path.join(folder, "log"))
            except OSError:  # it went before, or the job put something else there
                continue
        else:
            ending.stop(root, key, 0.0)  # which writes its tombstone
        left -= size - _size(folder)
        say(f"the output of job {key} is removed: {KEEP_LOGS_S / 86400:g} days, or 4 GiB in all")


def remove_unbegun(root: str, names: Iterable[str]) -> None:
    """Remove these folders, in which nothing runs, if they were prepared long ago: nobody will start it."""
    for name in names:
        prepared = os.path.join(job_files.directory_of(root, name), job_files.PREPARED)
        if (job_files.modified_at(prepared) or time.time()) < time.time() - KEEP_UNBEGUN_S:
            ending.stop(root, name, 0.0)


def _ended_at(root: str, key: str, state: Mapping[str, Any]) -> float:
    """Return when a job ended; of one that was killed, which left no exit code, when this was seen."""
    if state["ended_at"] is not None:
        return float(state["ended_at"])
    seen = os.path.join(job_files.directory_of(root, key), "seen")
    if not job_files.exists(seen):
        with suppress(OSError):  # a full disk
            job_files.write_file(seen, "")
    return job_files.modified_at(seen) or time.time()


def _size(folder: str) -> int:
    """Return the bytes on the disk of a folder's files: a long output has more than is kept of it."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_blocks * 512
    return size
