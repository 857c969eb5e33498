"""Launcher of jobs that Slurm places: this project grants nothing, submits, looks and tells."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import slurm_commands, slurm_job, slurm_script
from resource_manager.jobs.launchers.base import (
    BatchRequest,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    check_image,
    check_no_other_lease,
    job_key,
)
from resource_manager.jobs.launchers.devices import VISIBLE_DEVICES, check_environment
from resource_manager.jobs.launchers.directory_launcher import placed, status_of
from resource_manager.jobs.launchers.ssh import ANSWERS, Answer, SSHLauncher, StatusAnswer
from resource_manager.manager.results import SlurmJob

ROOT = "~/.gpu-manager/slurm"
"""Folder of the jobs, which login nodes and nodes share."""

OPTIONS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "exclude",
    "nodelist",
    "gres",
    "licenses",
)
"""Options of sbatch that a task may give by name; what it asks for otherwise follows from its demand."""


class Said(Answer):
    """What Slurm says of a job: its own state and reason, and why it waits, where it is and how it ended, in
    words, each empty where that is not so; times are seconds since the epoch.

    `never`: it waits for what does not happen by itself.
    """

    id: str
    state: str
    reason: str
    wait: str
    never: bool
    where: str
    end: str
    begins_at: float | None
    partition: str


class _Status(StatusAnswer):
    slurm: Said | None


class _Seen(Answer):
    text: str
    offset: int
    status: _Status


class _Look(Answer):
    jobs: dict[str, _Seen]
    cluster: str
    records: list[SlurmJob]


class _Current(Answer):
    key: str


class Seen(NamedTuple):
    """Part of a job's output and the offset of the next, its status, and what Slurm says of it."""

    text: str
    offset: int
    status: JobStatus
    said: Said | None

    @property
    def goes_on(self) -> bool:
        """Return whether the job runs, or waits for what may happen by itself."""
        return self.status.state is JobState.RUNNING and self.said is not None and not self.said.never


class Look(NamedTuple):
    """Jobs by key, and all jobs of the cluster's record where they were asked for."""

    jobs: dict[str, Seen]
    cluster: str
    records: list[SlurmJob]


def arguments_of(request: BatchRequest) -> list[str]:
    """Return the arguments of sbatch; raises `LauncherError` for an option that is not of `OPTIONS`."""
    given = {name: str(value) for name, value in (request.options or {}).items() if value not in (None, "")}
    for name, value in given.items():
        if name not in OPTIONS:
            raise LauncherError(f"slurm: unknown option {name!r}; known are {', '.join(OPTIONS)}")
        if "\n" in value or "\0" in value:
            raise LauncherError(f"slurm: {name} is not one line")
    found = [f"--{name}={value}" for name, value in given.items()]
    found.append(f"--nodes={request.nodes}")
    found.append(f"--cpus-per-task={max(1, math.ceil(request.cpus))}")
    if request.gpus:
        found.append(f"--gpus-per-node={f'{request.gpu_type}:' if request.gpu_type else ''}{request.gpus}")
    if request.memory_mib:
        found.append(f"--mem={request.memory_mib}M")
    if request.time_s is not None:
        found.append(f"--time={max(1, math.ceil(request.time_s / 60))}")
    return [*found, f"--signal=TERM@{max(1, round(request.grace_s))}"]


class LocalPython:
    """This machine, where it is a login node itself."""

    host = socket.gethostname()

    def run(self, program: str, timeout_s: float, library: str = "") -> tuple[int, str, str]:
        """Run a program; return exit code, output and standard error, or raise `LauncherUnreachableError`."""
        command, given = [sys.executable, "-I", "-S", "-"], f"{library}\n{program}"
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LauncherUnreachableError(f"Slurm gave no answer within {timeout_s:g} s") from error
        return done.returncode, done.stdout, done.stderr


class SlurmLauncher(SSHLauncher):
    """Launcher on the login node at `address`, or on this machine if neither that nor a connection is named.

    One job of Slurm runs on all nodes of a job. It asks for what `Job.batch` says, else for as many GPUs as
    `Job.gpu_ids` has; which ones it gets is Slurm's choice.
    """

    answers: ClassVar[dict[str, type[Answer]]] = {
        **ANSWERS,
        **dict.fromkeys(("status", "preempt"), _Status),
        "read_all": _Look,
        "current": _Current,
    }
    modules = (slurm_commands, slurm_script, slurm_job)

    def __init__(self, place: JobPlace) -> None:
        super().__init__(place, None if place.address or place.conn_id else LocalPython(), ROOT)

    def prepare(self, job: Job) -> JobPlace:
        _check(job)
        found = self.ask("prepare", key=job.key)
        check_no_other_lease(job.key, found["running"], "Slurm")
        self._place = placed(self._place, found)
        self.root = self._place.folder
        return self._place

    def start(self, job: Job) -> bool:
        asked = _check(job)
        found = self.ask(
            "start",
            key=job.key,
            command=list(job.command),
            environment={
                name: text for name, text in job.environment.items() if name not in VISIBLE_DEVICES.values()
            },
            options=arguments_of(asked),
            files=dict(job.files),
            gpus=asked.gpus,
            about=dict(asked.about or {}),
        )
        return bool(found["began"])

    def read_all(self, offsets: Mapping[str, int], since: float | None = None) -> Look:
        """Return what `logs` would, for many jobs by one question to Slurm; an offset below 0: no output.

        With `since` also the records of the jobs that are there or have ended since.
        """
        found, jobs = self.ask("read_all", offsets=dict(offsets), since=since), {}
        for key, each in found["jobs"].items():
            said = each["status"]["slurm"]
            seen = each["text"], each["offset"], status_of(each["status"])
            jobs[key] = Seen(*seen, None if said is None else Said(**said))
        return Look(jobs, found["cluster"], found["records"])

    def current(self, lease_id: str) -> str:
        """Return the key of the job of this lease id that is there, else of its next one."""
        return str(self.ask("current", lease=job_key(lease_id, 0)[:-1])["key"])


def _check(job: Job) -> BatchRequest:
    """Return what the job asks Slurm for; raises `LauncherError`."""
    check_image("slurm", job)
    check_environment(job.environment)
    asked = job.batch or BatchRequest(gpus=len(job.gpu_ids), cpus=job.cpus)
    arguments_of(asked)
    return asked
