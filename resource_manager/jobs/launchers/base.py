"""Launcher protocol and its values: the job of a lease, its status, and its errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from resource_manager.core.identifiers import as_reason
from resource_manager.core.identifiers import job_key as job_key
from resource_manager.core.models import MILLI_PER_GPU, JobPlace
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.launchers import walls


class LauncherError(ResourceManagerError):
    """Job could not be started, watched or stopped; the message says what to do.

    `server` is the one of the lease's servers that it is about, empty where that is not known.
    """

    server: str = ""


class LauncherUnreachableError(LauncherError):
    """Machine of the job does not answer, so it is unknown whether the job still runs."""


class NoAnswerError(LauncherUnreachableError):
    """Machine of the job gave no answer at all: another question would wait as long in vain."""


class AlreadyEndedError(LauncherError):
    """Job was stopped within the last day, maybe before it was started: it is not started again."""


class JobState(StrEnum):
    """State of a job on its machine; ABSENT if it was never started or has been removed."""

    ABSENT = "absent"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job; `exit_code` is None unless finished, and for a job that vanished without one.

    `ended_at` is when it wrote its exit code, `checkpoint_at` when it last saved a checkpoint, by its
    server's clock, None if unknown. `preempted`: it was told that its lease is taken.
    """

    state: JobState
    exit_code: int | None = None
    ended_at: float | None = field(default=None, compare=False)
    checkpoint_at: float | None = field(default=None, compare=False)
    preempted: bool = field(default=False, compare=False)


class Output(NamedTuple):
    """Part of a job's output, the offset of the next part, and the job's status before this one was read.

    `is_all`: there was no more of it; a launcher may not know.
    """

    text: str
    offset: int
    status: JobStatus
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a job asks Slurm for: GPUs, CPUs and MiB a node, its longest time, and sbatch's own options.

    `grace_s` is the time between SIGTERM and the end at the time limit. `about` is kept for those who list
    the jobs.
    """

    gpus: int = 0
    gpu_type: str = ""
    nodes: int = 1
    cpus: float = 1
    memory_mib: int = 0
    time_s: float | None = None
    grace_s: float = 60.0
    options: Mapping[str, str] | None = None
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Job of one lease; `key` (see `job_key`) names it on every machine.

    `environment` is the caller's; the launcher adds the variables that make its GPUs visible to the job, by
    `gpu_uuids` where they are known, else by `gpu_ids`. `gpu_memory_mib` is the memory it may use of each
    GPU, 0 if unknown; `mps_folder` is that of the MPS daemon which enforces its part. `container` has
    further options for a container, by the names of Docker's `create_host_config`. `files` are texts by the
    variable that gets the path of a file with the text; `port` is one that the job will listen on, 0 if none.
    `batch` is what Slurm is asked for. `confine` (`off`, `try`, `must`) says whether a plain process runs
    within walls, in which it may write to the paths `writable`. `user` is the account as which it has to run,
    empty if none is stated.
    """

    key: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    gpu_ids: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    gpu_milli: int = MILLI_PER_GPU
    gpu_memory_mib: int = 0
    mps_folder: str = ""
    vendor: str = "nvidia"
    cpus: float = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    batch: BatchRequest | None = None
    confine: str = "off"
    writable: tuple[str, ...] = ()
    user: str = ""


class Launcher(Protocol):
    """Runner of jobs on one machine; every method is idempotent by the job's key, from any process.

    One that was opened at a job's place, or has prepared a job, looks nowhere else: where another machine,
    folder or engine answers, every method raises `LauncherUnreachableError`.
    """

    def prepare(self, job: Job) -> JobPlace:
        """Make ready what a start needs, and start nothing; return where the job will be.

        Raises `LauncherError` if a start would fail, while a job of an earlier lease of the same id runs
        there, or if `port` is taken, and `AlreadyEndedError` after a `stop`.
        """

    def start(self, job: Job) -> bool:
        """Start the job detached from this process, unless it was started before; return whether it was not.

        Raises `AlreadyEndedError` after a `stop`, `LauncherUnreachableError` if it is unknown whether the job
        runs; after any other `LauncherError` no process of it does.
        """

    def status(self, key: str) -> JobStatus:
        """Return the job's status; raises `LauncherUnreachableError` if it cannot be known."""

    def logs(self, key: str, offset: int = 0) -> Output:
        """Return the job's output from `offset` on, with its status; raises as `status` does."""

    def tail(self, key: str) -> str:
        """Return the end of the job's output, at most `TAIL_BYTES`."""

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        """End the job, with SIGTERM until `grace_s` is over; return once it has ended. Its log stays."""

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        """Tell the job once that its lease is taken, end it `grace_s` later; return its status.

        Returns once the job has ended, or after `wait_s`; call it again until it has. The grace is that of
        the first call and counts from then, whichever process made it; the job finds it in the file that
        `$GPU_PREEMPT_FILE` names. Raises as `stop` does.
        """

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        """End the job as `terminate` does, and remove it; return once it is gone: whether it ran until then.

        From then on for a day no `start` of it succeeds, also if there was no job. Raises
        `LauncherUnreachableError` if it is unknown whether the job is gone.
        """

    def running(self) -> list[str]:
        """Return the keys of all jobs that run where this launcher would prepare one; raises as `status`."""

    def close(self) -> None:
        """Close the connection; the jobs continue."""


class JobSignals(Protocol):
    """Standing look at the jobs of one place, which tells when one ends; for one thread at a time."""

    def watch(self, key: str) -> None:
        """Tell of this job from now on, until it has ended."""

    def forget(self, key: str) -> None:
        """Tell no more of this job."""

    def changed(self, timeout_s: float) -> set[str]:
        """Return the jobs that ended or whose output grew, once there are some, at most that much later.

        Raises `LauncherError` if it cannot be known any more.
        """

    def close(self) -> None:
        """End the look; the jobs continue."""


ANSWER_TIMEOUT_S = 60.0
"""Time after which a server or a folder that gives no answer is out of reach."""

TAIL_BYTES = 16 * 1024
"""Most bytes of output that `tail` returns."""

ALLOWED_CONNECTIONS = "GPU_MANAGER_LAUNCHER_CONNECTIONS"
"""Environment variable with the comma-separated ids of the connections for launchers; any if not set."""


def check_connection(conn_id: str | None, conn_type: str) -> None:
    """Raise `LauncherError` unless the Airflow connection is allowed and of this type, or none is named.

    The owner of a lease names the connection in its labels, and must not gain credentials of other systems.
    """
    if conn_id is None:
        return
    allowed = os.environ.get(ALLOWED_CONNECTIONS)
    if allowed is not None and conn_id not in (name.strip() for name in allowed.split(",")):
        raise LauncherError(f"connection {conn_id!r} is not in {ALLOWED_CONNECTIONS}={allowed}: add it there")
    from resource_manager.airflow.version_compat import AirflowException, BaseHook

    try:
        found = BaseHook.get_connection(conn_id).conn_type
    except (AirflowException, ValueError) as error:
        raise LauncherError(f"{conn_type} connection {conn_id!r}: {error}") from error
    if found != conn_type:
        raise LauncherError(f"connection {conn_id!r} is of type {found}, not {conn_type}")


def check_image(launcher: str, job: Job) -> None:
    """Raise `LauncherError` unless the launcher of this name runs such a job: an image, or none."""
    if launcher == "docker" and not job.image:
        raise LauncherError("the docker launcher needs an image: set image")
    if launcher in ("local", "ssh", "agent") and job.image:
        raise LauncherError(f"the {launcher} launcher runs no images; use launcher='docker'")
    if launcher == "slurm" and job.image:
        raise LauncherError(
            "the slurm launcher runs no images: start the container in command, as by apptainer"
        )


def walls_of(confine: str, missing: str, server: str) -> str:
    """Return what the place of a job says of its walls, for which so much is missing there.

    Raises `LauncherError` if it must have them.
    """
    if confine == "must" and missing:
        raise LauncherError(walls.refusal(server, missing))
    return "" if confine == "off" else as_reason(f"{walls.NONE}{missing}") if missing else walls.BUBBLEWRAP


_KEY = re.compile(r"((.*-[0-9a-f]{8}-)\d+)(\.\d+)?")


def is_key(name: str) -> bool:
    """Return whether the name is that of a lease's job."""
    return re.fullmatch(r"gpu-[A-Za-z0-9_.-]*-[0-9a-f]{8}-\d+(\.\d+)?", name) is not None


def check_no_other_lease(key: str, running: Iterable[str], server: str) -> None:
    """Raise `LauncherError` if a job of the same lease id but another fencing token is among these."""
    own = _KEY.fullmatch(key)
    for name in running:
        other = _KEY.fullmatch(name)
        if own is not None and other is not None and own[2] == other[2] and own[1] != other[1]:
            raise LauncherError(f"job {name} of an earlier lease of this task still runs on {server}")
