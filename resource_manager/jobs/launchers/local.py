"""Launcher of jobs on this machine, detached from the worker that starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import directory_job
from resource_manager.jobs.launchers.base import (
    TAIL_BYTES,
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    Output,
    check_image,
    check_no_other_lease,
)
from resource_manager.jobs.launchers.devices import job_environment

LOCAL = JobPlace("local")
"""Place of jobs on this machine before one was prepared."""


def status_of(found: Mapping[str, Any]) -> JobStatus:
    """Return the status of a job in a directory."""
    return JobStatus(
        JobState(found["state"]),
        found["exit_code"],
        found["ended_at"],
        found["checkpoint_at"],
        found["preempted"],
    )


def refusal(name: str, reason: str, failed: str) -> LauncherError:
    """Return the error for a refusal of `directory_job`; `failed` says what did not happen."""
    if name == "NotStartedError":
        return LauncherError(f"{failed}: {reason}")
    return (AlreadyEndedError if name == "AlreadyEndedError" else LauncherUnreachableError)(reason)


def placed(place: JobPlace, prepared: Mapping[str, Any]) -> JobPlace:
    """Return the place with what `directory_job.prepare` says about it."""
    return replace(place, **{name: prepared[name] for name in ("machine", "folder", "mark", "user")})


class LocalLauncher:
    """Launcher that runs jobs as process groups of this machine, each with a directory under `root`."""

    def __init__(self, root: str | None = None, place: JobPlace = LOCAL) -> None:
        default = os.environ.get("GPU_MANAGER_JOBS_DIR", directory_job.DEFAULT_ROOT)
        self.root = place.folder or root or default
        self._place = place

    def prepare(self, job: Job) -> JobPlace:
        check_image(self._place.launcher, job)
        job_environment(job)
        with self._there(job.key, "cannot be started", LauncherError):
            found = directory_job.prepare(self.root, job.key, job.port)
        check_no_other_lease(job.key, found["running"], socket.gethostname())
        self._place = placed(self._place, found)
        return self._place

    def start(self, job: Job) -> None:
        check_image(self._place.launcher, job)
        environment = job_environment(job)
        with self._there(job.key, "could not be started"):
            directory_job.start(self.root, job.key, job.command, environment, files=job.files)

    def status(self, key: str) -> JobStatus:
        with self._there(key, "cannot be seen"):
            return status_of(directory_job.status(self.root, key))

    def logs(self, key: str, offset: int = 0) -> Output:
        with self._there(key, "cannot be seen"):
            found = directory_job.logs(self.root, key, offset)
        return Output(found["text"], found["offset"], status_of(found["status"]))

    def tail(self, key: str) -> str:
        with self._there(key, "cannot be seen"):
            return str(directory_job.tail(self.root, key, TAIL_BYTES)["text"])

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        with self._there(key, "could not be ended"):
            directory_job.terminate(self.root, key, grace_s)

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        with self._there(key, "could not be told that it is preempted"):
            return status_of(directory_job.preempt(self.root, key, grace_s, signal_name, wait_s))

    def stop(self, key: str, grace_s: float = 10.0) -> None:
        with self._there(key, "could not be stopped"):
            directory_job.stop(self.root, key, grace_s)

    def sign(self, key: str) -> None:
        """Tell the job, which runs in a terminal, that its caller is there."""
        with self._there(key, "could not be told that its caller is there"):
            directory_job.sign(self.root, key)

    @contextmanager
    def _there(
        self, key: str, failed: str, kind: type[LauncherError] = LauncherUnreachableError
    ) -> Iterator[None]:
        """Look at the job's place only; errors that leave its state unknown become one of this kind."""
        failed = f"job {key} {failed} on {socket.gethostname()}"
        try:
            if self._place.machine:
                directory_job.verify(key, asdict(self._place))
            yield
        except directory_job.RefusedError as error:
            raise refusal(type(error).__name__, str(error), failed) from error
        except (OSError, RuntimeError) as error:
            raise kind(f"{failed}: {error}") from error

    def close(self) -> None:
        """Do nothing: there is no connection."""
