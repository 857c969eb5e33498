"""Launcher of jobs on this machine, detached from the worker that starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from resource_manager.jobs.launchers import directory_job
from resource_manager.jobs.launchers.base import (
    TAIL_BYTES,
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


def status_of(found: Mapping[str, Any]) -> JobStatus:
    """Return the status of a job in a directory."""
    return JobStatus(
        JobState(found["state"]),
        found["exit_code"],
        found["ended_at"],
        found["checkpoint_at"],
        found["preempted"],
    )


class LocalLauncher:
    """Launcher that runs jobs as process groups of this machine, each with a directory under `root`.

    `host` is the machine of the jobs; on any other machine their state is unknown, which raises
    `LauncherUnreachableError`.
    """

    def __init__(self, root: str | None = None, host: str = "") -> None:
        if host and host != socket.gethostname():
            raise LauncherUnreachableError(
                f"the job is on {host}, not on this machine {socket.gethostname()}: launcher 'local' needs "
                "worker, triggerer and reconciler on one machine; use 'ssh' or 'docker' for several"
            )
        self.root = root or os.environ.get("GPU_MANAGER_JOBS_DIR", directory_job.DEFAULT_ROOT)

    def prepare(self, job: Job) -> None:
        check_image("local", job)
        job_environment(job)
        try:
            found = directory_job.prepare(self.root, job.key, job.port)
        except OSError as error:
            raise LauncherError(f"job {job.key} cannot be started here: {error}") from error
        check_no_other_lease(job.key, found["running"])

    def start(self, job: Job) -> None:
        check_image("local", job)
        environment = job_environment(job)
        try:
            directory_job.start(self.root, job.key, job.command, environment, files=job.files)
        except (OSError, RuntimeError, ValueError) as error:
            raise LauncherError(f"job {job.key} could not be started here: {error}") from error

    def status(self, key: str) -> JobStatus:
        with self._seeing(key):
            found = directory_job.status(self.root, key)
        return status_of(found)

    def logs(self, key: str, offset: int = 0) -> Output:
        with self._seeing(key):
            found = directory_job.logs(self.root, key, offset)
        return Output(found["text"], found["offset"], status_of(found["status"]))

    def tail(self, key: str) -> str:
        with self._seeing(key):
            return str(directory_job.tail(self.root, key, TAIL_BYTES)["text"])

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        with self._ending():
            directory_job.terminate(self.root, key, grace_s)

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        with self._ending():
            return status_of(directory_job.preempt(self.root, key, grace_s, signal_name, wait_s))

    def stop(self, key: str, grace_s: float = 10.0) -> None:
        with self._ending():
            directory_job.stop(self.root, key, grace_s)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise LauncherError(str(error)) from error

    @contextmanager
    def _seeing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # such as too many open files in the triggerer; the job may still run
            raise LauncherUnreachableError(f"the state of job {key} cannot be read here: {error}") from error

    def close(self) -> None:
        """Do nothing: there is no connection."""
