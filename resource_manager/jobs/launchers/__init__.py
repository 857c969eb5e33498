"""Launchers, which run the job of a granted lease: a protocol and its implementations by name."""

from resource_manager.jobs.launchers.base import (
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
    NoAnswerError,
    job_key,
)
from resource_manager.jobs.launchers.docker_command import build_docker_cmd
from resource_manager.jobs.launchers.registry import LAUNCHERS, open_at

__all__ = [
    "LAUNCHERS",
    "AlreadyEndedError",
    "Job",
    "JobState",
    "JobStatus",
    "Launcher",
    "LauncherError",
    "LauncherUnreachableError",
    "NoAnswerError",
    "build_docker_cmd",
    "job_key",
    "open_at",
]
