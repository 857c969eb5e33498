"""How a granted job runs: one small protocol, and a launcher by name."""

from resource_manager.launchers.base import (
    Job,
    JobState,
    JobStatus,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
    job_key,
)
from resource_manager.launchers.docker_command import build_docker_cmd
from resource_manager.launchers.registry import LAUNCHERS, open_launcher

__all__ = [
    "LAUNCHERS",
    "Job",
    "JobState",
    "JobStatus",
    "Launcher",
    "LauncherError",
    "LauncherUnreachableError",
    "build_docker_cmd",
    "job_key",
    "open_launcher",
]
