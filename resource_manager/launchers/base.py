"""The launcher protocol and its values: a job of a lease, its status, and what can go wrong."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from resource_manager.errors import ResourceManagerError
from resource_manager.models import MILLI_PER_GPU


class LauncherError(ResourceManagerError):
    """A job could not be started, watched or stopped; the message says what to do."""


class LauncherUnreachableError(LauncherError):
    """The place where the job runs does not answer, so nobody knows whether the job still lives."""


class JobState(StrEnum):
    ABSENT = "absent"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """`exit_code` is None unless finished, and also for a job that vanished without leaving one."""

    state: JobState
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to run for one lease; `key` (see `job_key`) names the job wherever it runs.

    `environment` is the caller's; the launcher adds what shows the job its `gpu_ids`. `gpu_memory_mib` is
    what it may use of the memory of each, 0 if unknown. `container` has more options for a container, by
    the names of Docker's `create_host_config`.
    """

    key: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    gpu_ids: tuple[int, ...] = ()
    gpu_milli: int = MILLI_PER_GPU
    gpu_memory_mib: int = 0
    vendor: str = "nvidia"
    cpus: float = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)


class Launcher(Protocol):
    """Runs jobs in one place. Every method is idempotent by the job's key, from any process."""

    def start(self, job: Job) -> None:
        """Starts the job detached from this process, unless it was started before."""

    def status(self, key: str) -> JobStatus:
        """How the job is; raises `LauncherUnreachableError` where that cannot be known."""

    def logs(self, key: str, offset: int = 0) -> tuple[str, int]:
        """The job's output from `offset` on, and the offset to go on from."""

    def stop(self, key: str, grace_s: float = 10.0) -> None:
        """Ends the job, politely for `grace_s`, and forgets it; returns only once it is really gone."""

    def close(self) -> None:
        """Lets go of the connection; the jobs go on."""


ALLOWED_CONNECTIONS = "GPU_MANAGER_LAUNCHER_CONNECTIONS"
"""Environment variable with the ids of the connections that launchers may use, by comma; any if not set."""


def check_connection(conn_id: str | None, conn_type: str) -> None:
    """Raises `LauncherError` unless the Airflow connection is allowed and of that type, or none is named.

    Who asks for a lease names the connection in its labels: credentials of other systems stay at home.
    """
    if conn_id is None:
        return
    allowed = os.environ.get(ALLOWED_CONNECTIONS)
    if allowed is not None and conn_id not in (name.strip() for name in allowed.split(",")):
        raise LauncherError(f"connection {conn_id!r} is not among {ALLOWED_CONNECTIONS}={allowed}: add it")
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowException

    try:
        found = BaseHook.get_connection(conn_id).conn_type
    except (AirflowException, ValueError) as error:
        raise LauncherError(f"{conn_type} connection {conn_id!r}: {error}") from error
    if found != conn_type:
        raise LauncherError(f"connection {conn_id!r} is of type {found}, not {conn_type}")


def job_key(task_id: str, fencing_token: int) -> str:
    """The name of a lease's job: readable, safe as a file or container name, unique by lease."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", task_id).strip("-.")[-60:].lstrip("-.")
    digest = hashlib.sha256(task_id.encode()).hexdigest()[:8]
    return f"gpu-{readable}-{digest}-{fencing_token}"
