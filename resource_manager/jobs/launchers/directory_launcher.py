"""Launcher of jobs in directories, wherever they are: what it asks `directories`, and what that answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import walls
from resource_manager.jobs.launchers.base import (
    ANSWER_TIMEOUT_S,
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
    walls_of,
)
from resource_manager.jobs.launchers.devices import MPS_PIPES, devices_of, job_environment

FAILED = {
    **dict.fromkeys(("prepare", "stage"), "cannot be started"),
    **dict.fromkeys(("start", "run"), "could not be started"),
    "terminate": "could not be ended",
    "preempt": "could not be told that it is preempted",
    "stop": "could not be stopped",
    "sign": "could not be told that its caller is there",
}
"""What to say of a job for which a call failed; other calls only look at it."""


def failure(act: str, key: str, host: str) -> str:
    """Return what did not happen where that call failed."""
    return f"job {key} {FAILED.get(act, 'cannot be seen')} on {host}"


def kind_of_failure(act: str) -> type[LauncherError]:
    """Return the error for a call of which nobody knows what it did: only the first two start nothing."""
    return LauncherError if act in ("prepare", "stage") else LauncherUnreachableError


def status_of(answer: Mapping[str, Any]) -> JobStatus:
    return JobStatus(
        JobState(answer["state"]),
        answer["exit_code"],
        answer["ended_at"],
        answer["checkpoint_at"],
        answer["preempted"],
    )


def output_of(answer: Mapping[str, Any]) -> Output:
    return Output(answer["text"], answer["offset"], status_of(answer["status"]), answer["is_all"])


def refusal(name: str, reason: str, failed: str) -> LauncherError:
    """Return the error for a refusal of `jobs.directories`; `failed` says what did not happen."""
    if name == "NotStartedError":
        return LauncherError(f"{failed}: {reason}")
    return (AlreadyEndedError if name == "AlreadyEndedError" else LauncherUnreachableError)(reason)


def placed(place: JobPlace, prepared: Mapping[str, Any], walls: str = "") -> JobPlace:
    """Return the place with what `starting.prepare` says about it, and with the job's walls."""
    found = {name: prepared[name] for name in ("machine", "folder", "mark", "user")}
    return replace(place, **found, walls=walls)


def check_user(job: Job, user: str, address: str, server: str) -> None:
    """Raise `LauncherError` if the job would run there as another user than the cluster's file says.

    Within walls that it must have it runs as root only if team or address names root.
    """
    if job.user and user != job.user:
        raise LauncherError(
            f"jobs of this team run as user {job.user}, but on {server} this one would as {user}: use "
            "launcher ssh, which logs in as that user, or start it there as that user"
        )
    if job.confine == "must" and user == "root" and job.user != "root" and not address.startswith("root@"):
        raise LauncherError(
            f"{server} confines its jobs (confine = must), but this one would run as root: state a user in "
            "its team's table, or root there or in the server's address"
        )


def check_of(job: Job) -> list[str]:
    """Return the arguments of Python that say what is missing for the job's walls; none if it has none."""
    return [] if job.confine == "off" else [*_program_of(job), walls.CHECK]


def before_command(job: Job, place: JobPlace, python: str = sys.executable) -> list[str]:
    """Return the program that the job's command follows there, which puts it within walls or says why not."""
    if job.confine == "off":
        return []
    if place.walls.startswith(walls.NONE):
        return [python, *walls.telling(place.walls.removeprefix(walls.NONE))]
    return [python, *_program_of(job)]


def _program_of(job: Job) -> list[str]:
    mps = devices_of(job).get(MPS_PIPES, "")
    return walls.program_of(job.gpu_ids, job.gpu_uuids, job.vendor, job.writable, mps)


def spec_of(job: Job) -> dict[str, Any]:
    """Return what the caller of a job says of its start by an agent, as plain values."""
    return {
        "command": list(job.command),
        "environment": job_environment(job),
        "files": dict(job.files),
        "port": job.port,
    }


def rules_of(job: Job) -> dict[str, Any]:
    """Return what the cluster says of a job's start by an agent, as plain values."""
    return {
        "user": job.user,
        "confine": job.confine,
        "walls": [] if job.confine == "off" else _program_of(job),
    }


def time_for(arguments: Mapping[str, Any]) -> float:
    """Return the longest time for the answer to a call, which waits for a job's end in some."""
    taken_s: float = arguments.get("wait_s", arguments.get("grace_s", 0.0))
    return ANSWER_TIMEOUT_S + taken_s


class DirectoryLauncher:
    """Launcher of jobs at one place, in directories below `root`; `host` is the machine in errors.

    `python` is the program that runs Python there.
    """

    python = sys.executable

    def __init__(self, place: JobPlace, root: str, host: str) -> None:
        self.root, self.host = place.folder or root, host
        self._place = place

    def ask(self, act: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of `jobs.directories` at the place, and nowhere else.

        Raises `LauncherUnreachableError` if the job's state is unknown, else `LauncherError`.
        """
        raise NotImplementedError

    def place_for(self, act: str) -> dict[str, str] | None:
        """Return the place as it is verified before the call, None where nothing was prepared yet.

        A folder without its machine is a way by which jobs come to machines: it is asked what runs there, and
        every other call is refused, since it would act on what is in a folder that the lease's owner names.
        """
        is_way = not self._place.machine and act == "running"
        return asdict(self._place) if self._place.machine or (self._place.folder and not is_way) else None

    def prepare(self, job: Job) -> JobPlace:
        check_image(self._place.launcher, job)
        job_environment(job)
        found = self.ask("prepare", key=job.key, port=job.port, walls=check_of(job))
        check_no_other_lease(job.key, found["running"], self.host)
        self._place = placed(self._place, found, walls_of(job.confine, found["walls"], self.host))
        check_user(job, found["user"], self._place.address, self.host)
        self.root = self._place.folder
        return self._place

    def start(self, job: Job) -> bool:
        check_image(self._place.launcher, job)
        call = {
            "command": list(job.command),
            "environment": job_environment(job),
            "files": dict(job.files),
            "walls": before_command(job, self._place, self.python),
        }
        return bool(self.ask("start", key=job.key, **call)["began"])

    def stage(self, key: str, program: str) -> str:
        return str(self.ask("stage", key=key, program=program)["path"])

    def status(self, key: str) -> JobStatus:
        return status_of(self.ask("status", key=key))

    def logs(self, key: str, offset: int = 0) -> Output:
        return output_of(self.ask("logs", key=key, offset=offset))

    def tail(self, key: str) -> str:
        return str(self.ask("tail", key=key, size=TAIL_BYTES)["text"])

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        self.ask("terminate", key=key, grace_s=grace_s)

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        told = {"grace_s": grace_s, "signal_name": signal_name, "wait_s": wait_s}
        return status_of(self.ask("preempt", key=key, **told))

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        return bool(self.ask("stop", key=key, grace_s=grace_s)["ran"])

    def running(self) -> list[str]:
        return list(self.ask("running", user=self._place.user)["running"])

    def sign(self, key: str) -> None:
        """Tell the job, which runs in a terminal, that its caller is there."""
        self.ask("sign", key=key)

    def close(self) -> None:
        """Do nothing: no connection is this launcher's own."""
