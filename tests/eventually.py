"""Waiting with a timeout for events in another thread or process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from resource_manager.jobs.launchers import JobState, JobStatus, Launcher

T = TypeVar("T")

TIMEOUT_FACTOR = float(os.environ.get("E2E_TIMEOUT_FACTOR", "1"))
"""Factor on all time limits, for machines slower than two idle cores."""


def wait_for(
    condition: Callable[[], T], timeout_s: float = 30.0, what: str = "it", every_s: float = 0.02
) -> T:
    """Poll until the condition is true, and return its value; fail if `timeout_s` seconds do not suffice."""
    timeout_s *= TIMEOUT_FACTOR
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(every_s)
    return found


def wait_until_ended(launcher: Launcher, key: str, timeout_s: float = 60.0) -> JobStatus:
    """Wait for the job's end and return its status."""
    wait_for(lambda: launcher.status(key).state is JobState.FINISHED, timeout_s)
    return launcher.status(key)


def processes_of_command(command: str) -> list[Any]:
    """Return the processes of this machine that run it."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == command.split() and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes
