"""Runs jobs on this machine, detached from the worker that starts them."""

from __future__ import annotations

import os
import subprocess

from resource_manager.launchers import directory_job
from resource_manager.launchers.base import Job, JobState, JobStatus, LauncherError

DEFAULT_ROOT = "~/.gpu-manager/jobs"


class LocalLauncher:
    """Jobs as process groups of this machine, each with a directory under `root`."""

    def __init__(self, root: str | None = None) -> None:
        self.root = root or os.environ.get("GPU_MANAGER_JOBS_DIR", DEFAULT_ROOT)

    def start(self, job: Job) -> None:
        if job.image:
            raise LauncherError("the local launcher runs no images; use launcher='docker'")
        try:
            directory_job.start(self.root, job.key, job.command, dict(job.environment))
        except (OSError, subprocess.CalledProcessError) as error:
            raise LauncherError(f"job {job.key} could not be started here: {error}") from error

    def status(self, key: str) -> JobStatus:
        found = directory_job.status(self.root, key)
        return JobStatus(JobState(found["state"]), found["exit_code"])

    def logs(self, key: str, offset: int = 0) -> tuple[str, int]:
        found = directory_job.logs(self.root, key, offset)
        return found["text"], found["offset"]

    def stop(self, key: str, grace_s: float = 10.0) -> None:
        try:
            directory_job.stop(self.root, key, grace_s)
        except (OSError, RuntimeError) as error:
            raise LauncherError(str(error)) from error
