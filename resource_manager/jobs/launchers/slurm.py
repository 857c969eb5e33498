"""Launcher of jobs that Slurm places: this project grants nothing, submits, looks and tells."""

from __future__ import annotations

import inspect
import math
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import directory_job, slurm_commands, slurm_job, slurm_script
from resource_manager.jobs.launchers.base import (
    BatchRequest,
    Job,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    check_no_other_lease,
    job_key,
)
from resource_manager.jobs.launchers.devices import VISIBLE_DEVICES, check_environment
from resource_manager.jobs.launchers.local import placed, status_of
from resource_manager.jobs.launchers.ssh import ANSWERS, Answer, SSHLauncher, StatusAnswer

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

WAITS = {
    "Resources": "it is next, and not enough is free",
    "Priority": "others are before it",
    "None": "Slurm has not looked at it yet",
    "Dependency": "a job of the same name has not ended",
    "BeginTime": "its begin lies ahead",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "its owner holds it",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
    "QOSMaxGRESPerUser": "its user has all GPUs that the QOS allows a user",
    "QOSMaxJobsPerUserLimit": "its user has all jobs that the QOS allows a user",
    "QOSGrpGRES": "the QOS has all GPUs that it may have",
    "AssocGrpGRES": "its account has all GPUs that it may have",
    "AssocMaxJobsLimit": "its account has all jobs that it may have",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "Licenses": "a licence that it needs is in use",
}
"""Slurm's reasons of a wait in words; another reason is told as Slurm spells it."""

NEVER = {
    "PartitionTimeLimit": "its time is above the limit of the partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "PartitionConfig": "the partition does not take such a job",
    "BadConstraints": "no node can fulfil its constraints",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSNotAllowed": "its QOS is not allowed there",
    "AccountNotAllowed": "its account is not allowed in the partition",
    "AssocMaxWallDurationPerJobLimit": "its time is above the limit of its account",
    "QOSMaxWallDurationPerJobLimit": "its time is above the limit of the QOS",
    "QOSMaxGRESPerJob": "it asks for more GPUs than the QOS allows a job",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than the QOS allows a job",
    "AssocMaxNodePerJobLimit": "it asks for more nodes than its account may have in a job",
    "DependencyNeverSatisfied": "its dependency can never be fulfilled",
}
"""Reasons for which a job waits until somebody changes it or the cluster: the task fails."""

ENDS = {
    "PREEMPTED": "Slurm preempted the job",
    "NODE_FAIL": "a node of the job failed",
    "TIMEOUT": "Slurm ended the job at its time limit",
    "OUT_OF_MEMORY": "the job used more memory than it asked for",
    "CANCELLED": "the job was cancelled on Slurm",
    "DEADLINE": "Slurm ended the job at its deadline",
    "BOOT_FAIL": "a node of the job did not boot",
}
"""Ends that are Slurm's, in words; any other is told by its exit code."""


LOADER = """
import json, sys, types

def load(package, sources, call):
    sys.modules[package] = found = types.ModuleType(package)
    for name, source in sources.items():
        module = types.ModuleType(package + "." + name)
        setattr(found, name, module)
        exec(compile(source, name, "exec"), module.__dict__)
    found.directory_job.answer(call, found.slurm_job.ACTS, found.slurm_job.cluster)
"""
"""Program that loads modules which import each other from their package."""


class Said(Answer):
    """What Slurm says of a job: times in seconds since the epoch, devices as [nodes, GPU numbers]."""

    id: str
    state: str
    reason: str
    begins_at: float | None
    partition: str
    devices: list[list[str]]
    gpus_granted: int

    @property
    def where(self) -> str:
        """Return the nodes, with the numbers of their GPUs where Slurm tells them; empty before the start."""
        return ", ".join(f"{nodes} GPU {numbers}" if numbers else nodes for nodes, numbers in self.devices)

    @property
    def wait(self) -> str:
        """Return why the job does not run yet, in words and in Slurm's own; empty if it is not pending."""
        if self.state != "PENDING":
            return ""
        reason = self.reason or "None"
        word = re.split(r"[,(_]", reason, maxsplit=1)[0].strip()
        told = WAITS.get(word) or NEVER.get(word)
        return f"{told} ({reason})" if told and self.reason else told or reason

    @property
    def never(self) -> bool:
        """Return whether the job waits for what does not happen by itself."""
        return self.state == "PENDING" and re.split(r"[,(_]", self.reason, maxsplit=1)[0] in NEVER

    @property
    def end(self) -> str:
        """Return how Slurm ended the job; empty if the job ended itself."""
        return ENDS.get(self.state, "")


class Record(Said):
    """Job on Slurm for those who list them: what its task asked for, and what Slurm says."""

    key: str
    lease_id: str
    conn_id: str
    labels: dict[str, str]
    owner: str
    team: str
    gpus: int
    nodes: int
    exit_code: int | None
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None


class _Status(StatusAnswer):
    slurm: Said | None


class _Seen(Answer):
    text: str
    offset: int
    status: _Status


class _Seens(Answer):
    jobs: dict[str, _Seen]


class _Current(Answer):
    key: str


class _Records(Answer):
    records: list[Record]
    cluster: str


class Seen(NamedTuple):
    """Part of a job's output and the offset of the next, its status, and what Slurm says of it."""

    text: str
    offset: int
    status: JobStatus
    said: Said | None


def arguments_of(asked: BatchRequest) -> list[str]:
    """Return the arguments of sbatch; raises `LauncherError` for an option that is not of `OPTIONS`."""
    given = {name: str(value) for name, value in (asked.options or {}).items() if value not in (None, "")}
    for name, value in given.items():
        if name not in OPTIONS:
            raise LauncherError(f"slurm: unknown option {name!r}; known are {', '.join(OPTIONS)}")
        if "\n" in value or "\0" in value:
            raise LauncherError(f"slurm: {name} is not one line")
    found = [f"--{name}={value}" for name, value in given.items()]
    found.append(f"--cpus-per-task={max(1, math.ceil(asked.cpus))}")
    if asked.gpus:
        found.append(f"--gpus-per-node={f'{asked.gpu_type}:' if asked.gpu_type else ''}{asked.gpus}")
    if asked.memory_mib:
        found.append(f"--mem={asked.memory_mib}M")
    if asked.time_s is not None:
        found.append(f"--time={max(1, math.ceil(asked.time_s / 60))}")
    return [*found, f"--signal=B:TERM@{max(1, round(asked.grace_s))}"]


class LocalPython:
    """This machine, where it is a login node itself."""

    host = socket.gethostname()

    def run(self, program: str, timeout_s: float) -> tuple[int, str, str]:
        """Run a program; return exit code, output and standard error, or raise `LauncherUnreachableError`."""
        command = [sys.executable, "-I", "-S", "-"]
        try:
            done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LauncherUnreachableError(f"Slurm gave no answer within {timeout_s:g} s") from error
        return done.returncode, done.stdout, done.stderr

    def close(self) -> None:
        """Do nothing: there is no connection."""


class SlurmLauncher(SSHLauncher):
    """Launcher on the login node at `address`, or on this machine if neither that nor a connection is named.

    One job of Slurm runs on all nodes of a job. It asks for what `Job.batch` says, else for as many GPUs as
    `Job.gpu_ids` has; which ones it gets is Slurm's choice.
    """

    answers: ClassVar[dict[str, type[Answer]]] = {
        **ANSWERS,
        **dict.fromkeys(("status", "preempt"), _Status),
        "look": _Seens,
        "current": _Current,
        "records": _Records,
    }

    def __init__(self, place: JobPlace) -> None:
        if place.address or place.conn_id:
            super().__init__(place.address, place.conn_id or None, place=place)
        else:
            super().__init__("local", server=LocalPython(), place=place)
        self.root = place.folder or ROOT

    def prepare(self, job: Job) -> JobPlace:
        _check(job)
        found = self.ask("prepare", key=job.key)
        check_no_other_lease(job.key, found["running"], "Slurm")
        self._place = placed(self._place, found)
        self.root = self._place.folder
        return self._place

    def start(self, job: Job) -> None:
        asked = _check(job)
        self.ask(
            "start",
            key=job.key,
            command=list(job.command),
            environment={
                name: text for name, text in job.environment.items() if name not in VISIBLE_DEVICES.values()
            },
            options=arguments_of(asked),
            files=dict(job.files),
            nodes=asked.nodes,
            gpus=asked.gpus,
            about=dict(asked.about or {}),
        )

    def look(self, offsets: Mapping[str, int]) -> dict[str, Seen]:
        """Return what `logs` would, for many jobs by one question to Slurm; an offset below 0: no output."""
        found = self.ask("look", offsets=dict(offsets))["jobs"]
        return {
            key: Seen(each["text"], each["offset"], status_of(each["status"]), _said(each["status"]["slurm"]))
            for key, each in found.items()
        }

    def current(self, lease_id: str) -> str:
        """Return the key of the job of this lease id that is there, else of its next one."""
        return str(self.ask("current", lease=job_key(lease_id, 0)[:-1])["key"])

    def records(self, since: float = 0.0) -> tuple[str, list[Record]]:
        """Return the cluster's name, and the jobs that are there or have ended since."""
        found = self.ask("records", since=since)
        return found["cluster"].partition("/")[2], [Record(**each) for each in found["records"]]

    def program(self, call: str) -> str:
        sent = (directory_job, slurm_commands, slurm_script, slurm_job)
        sources = {module.__name__.rpartition(".")[2]: inspect.getsource(module) for module in sent}
        return f"{LOADER}\nload({__package__!r}, {sources!r}, json.loads({call!r}))\n"


def _check(job: Job) -> BatchRequest:
    """Return what the job asks Slurm for; raises `LauncherError`."""
    if job.image:
        raise LauncherError(
            "the slurm launcher runs no images: start the container in command, as by apptainer"
        )
    check_environment(job.environment)
    asked = job.batch or BatchRequest(gpus=len(job.gpu_ids), cpus=job.cpus)
    arguments_of(asked)
    return asked


def _said(found: Mapping[str, Any] | None) -> Said | None:
    return None if found is None else Said(**found)
