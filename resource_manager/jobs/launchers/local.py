"""Launcher of jobs on this machine, detached from the worker that starts them."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from threading import Thread
from typing import Any, TypeVar

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import directory_job, walls
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

T = TypeVar("T")

LOCAL = JobPlace("local")
"""Place of jobs on this machine before one was prepared."""


def status_of(answer: Mapping[str, Any]) -> JobStatus:
    """Return the status of a job in a directory."""
    return JobStatus(
        JobState(answer["state"]),
        answer["exit_code"],
        answer["ended_at"],
        answer["checkpoint_at"],
        answer["preempted"],
    )


def refusal(name: str, reason: str, failed: str) -> LauncherError:
    """Return the error for a refusal of `directory_job`; `failed` says what did not happen."""
    if name == "NotStartedError":
        return LauncherError(f"{failed}: {reason}")
    return (AlreadyEndedError if name == "AlreadyEndedError" else LauncherUnreachableError)(reason)


def placed(place: JobPlace, prepared: Mapping[str, Any], walls: str = "") -> JobPlace:
    """Return the place with what `directory_job.prepare` says about it, and with the job's walls."""
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


class LocalSignals:
    """Standing look at the jobs of a place on this machine."""

    def __init__(self, place: JobPlace) -> None:
        self._place = place
        self._lookout = directory_job.Lookout(place.folder)
        self.watch, self.forget = self._lookout.watch, self._lookout.forget

    def changed(self, timeout_s: float) -> set[str]:
        until = time.monotonic() + timeout_s
        try:
            directory_job.verify(directory_job.ANY, asdict(self._place))
            while not (found := self._lookout.changed()) and time.monotonic() < until:
                time.sleep(directory_job.TICK_S)
        except (directory_job.RefusedError, OSError) as error:
            raise LauncherUnreachableError(f"jobs in {self._place.folder} cannot be seen: {error}") from error
        return set(found)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LocalLauncher:
    """Launcher that runs jobs as process groups of this machine, each with a directory under `root`."""

    def __init__(self, root: str | None = None, place: JobPlace = LOCAL) -> None:
        default = os.environ.get("GPU_MANAGER_JOBS_DIR", directory_job.DEFAULT_ROOT)
        self.root = place.folder or root or default
        self._place = place

    def prepare(self, job: Job) -> JobPlace:
        check_image(self._place.launcher, job)
        job_environment(job)
        found = self._ask(
            job.key,
            "cannot be started",
            lambda: directory_job.prepare(self.root, job.key, job.port, check_of(job)),
            kind=LauncherError,
        )
        server = socket.gethostname()
        check_no_other_lease(job.key, found["running"], server)
        self._place = placed(self._place, found, walls_of(job.confine, found["walls"], server))
        check_user(job, found["user"], self._place.address, server)
        return self._place

    def start(self, job: Job) -> bool:
        check_image(self._place.launcher, job)
        environment = job_environment(job)
        before = before_command(job, self._place)
        found = self._ask(
            job.key,
            "could not be started",
            lambda: directory_job.start(
                self.root, job.key, job.command, environment, files=job.files, walls=before
            ),
        )
        return bool(found["began"])

    def stage(self, key: str, program: str) -> str:
        staged = self._ask(
            key,
            "cannot be started",
            lambda: directory_job.stage(self.root, key, program),
            kind=LauncherError,
        )
        return str(staged["path"])

    def status(self, key: str) -> JobStatus:
        return status_of(self._ask(key, "cannot be seen", lambda: directory_job.status(self.root, key)))

    def logs(self, key: str, offset: int = 0) -> Output:
        found = self._ask(key, "cannot be seen", lambda: directory_job.logs(self.root, key, offset))
        return Output(found["text"], found["offset"], status_of(found["status"]), found["is_all"])

    def tail(self, key: str) -> str:
        found = self._ask(key, "cannot be seen", lambda: directory_job.tail(self.root, key, TAIL_BYTES))
        return str(found["text"])

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        self._ask(
            key,
            "could not be ended",
            lambda: directory_job.terminate(self.root, key, grace_s),
            takes_s=grace_s,
        )

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        found = self._ask(
            key,
            "could not be told that it is preempted",
            lambda: directory_job.preempt(self.root, key, grace_s, signal_name, wait_s),
            takes_s=wait_s,
        )
        return status_of(found)

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        found = self._ask(
            key,
            "could not be stopped",
            lambda: directory_job.stop(self.root, key, grace_s),
            takes_s=grace_s,
        )
        return bool(found["ran"])

    def running(self) -> list[str]:
        found = self._ask(
            directory_job.ANY,
            "cannot be seen",
            lambda: directory_job.running(self.root, self._place.user),
        )
        return list(found["running"])

    def sign(self, key: str) -> None:
        """Tell the job, which runs in a terminal, that its caller is there."""
        self._ask(
            key,
            "could not be told that its caller is there",
            lambda: directory_job.sign(self.root, key),
        )

    def _ask(
        self,
        key: str,
        failed: str,
        act: Callable[[], T],
        *,
        kind: type[LauncherError] = LauncherUnreachableError,
        takes_s: float = 0.0,
    ) -> T:
        """Return the answer from the job's place only; errors that leave its state unknown become of `kind`.

        A folder whose file system hangs is left after `ANSWER_TIMEOUT_S` and the time that the call takes.
        """
        failed = f"job {key} {failed} on {socket.gethostname()}"
        answer: Future[T] = Future()

        def act_there() -> None:
            try:
                if self._place.machine:
                    directory_job.verify(key, asdict(self._place))
                answer.set_result(act())
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=act_there, daemon=True, name=f"look at {key}").start()
        try:
            return answer.result(ANSWER_TIMEOUT_S + takes_s)
        except directory_job.RefusedError as error:
            raise refusal(type(error).__name__, str(error), failed) from error
        except TimeoutError as error:
            raise LauncherUnreachableError(f"{failed}: {self.root} does not answer") from error
        except (OSError, RuntimeError) as error:
            raise kind(f"{failed}: {error}") from error

    def close(self) -> None:
        """Do nothing: there is no connection."""
