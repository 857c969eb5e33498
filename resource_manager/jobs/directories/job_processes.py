"""Processes of a job, told from others by what they inherit: its lock, a variable, its process group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

from resource_manager.jobs.directories import job_files

SLACK_S = 1.0
"""Longest difference of the clocks of a file and of a process's beginning, which has steps of 10 ms."""


def processes_of(directory: str) -> Iterator[int]:
    """Yield the ids of the job's processes: by its lock, variable or group; none without /proc.

    The number of the group may be another one's when its last process has ended. So it counts only if one
    of its processes began before it was last known to be the job's.
    """
    path = os.path.join(directory, "lock")
    lock = None
    with suppress(FileNotFoundError), job_files.own_folder(directory) as folder:
        if folder is not None:  # else somebody has removed the job's directory
            found = os.stat("lock", dir_fd=folder, follow_symlinks=False)
            lock = found.st_dev, found.st_ino
    mark = os.fsencode(f"GPU_JOB_LOCK={path}")
    group = group_of(directory)
    known_at = _known_at(directory)
    is_own = False
    others: list[int] = []
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        if int(process) == os.getpid():
            continue
        is_marked = _is_marked(process, mark, lock)
        if is_marked:
            yield int(process)
        began_at = None if group is None else _beginning_in(group, process)
        if began_at is not None:
            is_own = is_own or began_at <= known_at
            if not is_marked:
                others.append(int(process))
    if is_own:
        yield from others


def group_of(directory: str) -> int | None:
    """Return the number of the job's process group; None before its start, or for one that is not its own."""
    group = None
    with suppress(IsADirectoryError), job_files.own_folder(directory) as folder:
        group = None if folder is None else job_files.number_of("group", folder)
    if group is not None and (group <= 1 or group == os.getpgrp()):
        return None  # the job wrote it, to end others
    return group


def has_group(directory: str) -> bool:
    """Return whether there is a group of that number, without a look at all processes; mostly the job's."""
    group = group_of(directory)
    if group is None:
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def know_group(directory: str) -> None:
    """Note that the group is the job's now."""
    with suppress(OSError):  # a disk that has become read-only, or a folder that is gone
        os.utime(os.path.join(directory, "group"), follow_symlinks=False)


def _known_at(directory: str) -> float:
    """Return when the group was last known to be the job's: a process in it writes the exit code."""
    times = [job_files.modified_at(os.path.join(directory, name)) for name in ("group", "exit_code")]
    known_at = max(at or 0.0 for at in times) + SLACK_S
    return known_at if known_at <= time.time() + 2 * SLACK_S else 0.0  # else this clock went back since


def _is_marked(process: str, mark: bytes, lock: tuple[int, int] | None) -> bool:
    with suppress(OSError):
        with open(f"/proc/{process}/environ", "rb") as environment:
            if mark in environment.read().split(b"\0"):
                return True
        for descriptor in os.listdir(f"/proc/{process}/fd") if lock else ():
            with suppress(OSError):
                found = os.stat(f"/proc/{process}/fd/{descriptor}")
                if (found.st_dev, found.st_ino) == lock and _is_inherited(process, descriptor):
                    return True
    return False


def _is_inherited(process: str, descriptor: str) -> bool:
    """Return whether programs that the process starts get this descriptor: those that test a lock keep it."""
    flags = next(
        line
        for line in job_files.text_of(f"/proc/{process}/fdinfo/{descriptor}").splitlines()
        if "flags" in line
    )
    return not int(flags.split()[1], 8) & os.O_CLOEXEC


def _beginning_in(group: int, process: str) -> float | None:
    """Return when a process of this group or session began; None for another one, or one that has ended."""
    with suppress(OSError):
        if group in (os.getpgid(int(process)), os.getsid(int(process))):
            fields = job_files.text_of(f"/proc/{process}/stat", 1024).rpartition(") ")[2].split()
            booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            if fields[0] not in "ZX":
                return booted_at + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None
