"""Launcher of jobs on servers reached by ssh; the jobs outlive the connection."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from resource_manager.core.models import MAX_TIME_S, JobPlace
from resource_manager.errors import how_to_install
from resource_manager.jobs.launchers import directory_job
from resource_manager.jobs.launchers.base import (
    ANSWER_TIMEOUT_S,
    TAIL_BYTES,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    Output,
    check_connection,
    check_image,
    check_no_other_lease,
    walls_of,
)
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.launchers.local import (
    before_command,
    check_of,
    check_user,
    placed,
    refusal,
    status_of,
)
from resource_manager.jobs.launchers.plain_ssh import parts_of, silence
from resource_manager.jobs.launchers.ssh_python import PythonServer, SSHPython
from resource_manager.jobs.launchers.ssh_standing import PROGRAM

Time = Annotated[float, Field(ge=0, le=MAX_TIME_S)]


class Answer(BaseModel):
    """What a server answers; each kind of call has a form of its own."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StatusAnswer(Answer):
    state: JobState
    exit_code: int | None
    ended_at: Time | None
    checkpoint_at: Time | None
    preempted: bool


class _Tail(Answer):
    text: str


class _Output(_Tail):
    offset: NonNegativeInt
    status: StatusAnswer
    is_all: bool = False


class _Running(Answer):
    running: list[str]


class _Prepared(_Running):
    machine: str
    folder: str
    mark: str
    user: str
    walls: str = Field(max_length=directory_job.MAX_SHORT_BYTES)


class _Staged(Answer):
    path: str


class _Started(Answer):
    began: bool


class _Stopped(Answer):
    ran: bool


class _Refused(Answer):
    refused: Literal["AlreadyEndedError", "ElsewhereError", "NotStartedError", "StillRunsError"]
    reason: str


ANSWERS: dict[str, type[Answer]] = {
    **dict.fromkeys(("status", "preempt"), StatusAnswer),
    **dict.fromkeys(("terminate", "sign"), Answer),
    "start": _Started,
    "stop": _Stopped,
    "prepare": _Prepared,
    "running": _Running,
    "stage": _Staged,
    "logs": _Output,
    "tail": _Tail,
}
"""Form of each call's answer: a job runs in the account that gives it, and may have put another there."""


class SSHSignals:
    """Standing look at the jobs of a place, over the connection that the calls for them use."""

    def __init__(self, place: JobPlace) -> None:
        self._server = _shared_server(place.address, place.conn_id or None)
        verify = f"verify(ANY, json.loads({json.dumps(asdict(place))!r}))"
        self._looking = ExitStack()
        with self._server.reporting():
            looking = self._server.lookout(place.folder, inspect.getsource(directory_job), verify)
            self._lookout = self._looking.enter_context(looking)

    def watch(self, key: str) -> None:
        with self._server.reporting():
            self._lookout.watch(key)

    def forget(self, key: str) -> None:
        with self._server.reporting():
            self._lookout.forget(key)

    def changed(self, timeout_s: float) -> set[str]:
        with self._server.reporting():
            return self._lookout.changed(timeout_s)

    def close(self) -> None:
        self._looking.close()


class SSHLauncher:
    """Launcher of jobs in directories of a server, which needs python3 (3.7 or newer) and nothing else.

    `address` is `[user@]host[:port]`; missing parts and the credentials come from the connection, unless
    `server` is one that is reached in another way. `place` is that of the job, if it was prepared before.
    """

    answers: ClassVar[dict[str, type[Answer]]] = ANSWERS

    def __init__(
        self,
        address: str = "",
        ssh_conn_id: str | None = None,
        server: PythonServer | None = None,
        place: JobPlace | None = None,
    ) -> None:
        if not address and ssh_conn_id is None:
            raise LauncherError(
                "the ssh launcher has no address: set the server's address in the inventory, or "
                "launcher_conn_id"
            )
        self._place = place or JobPlace("ssh", address, ssh_conn_id or "")
        self.root = self._place.folder or directory_job.DEFAULT_ROOT
        if server is None:
            server = _shared_server(address, ssh_conn_id)
        self._server = server

    def prepare(self, job: Job) -> JobPlace:
        check_image(self._place.launcher, job)
        job_environment(job)
        found = self.ask("prepare", key=job.key, port=job.port, walls=check_of(job))
        check_no_other_lease(job.key, found["running"], self._server.host)
        there = walls_of(job.confine, found["walls"], self._server.host)
        self._place = placed(self._place, found, there)
        check_user(job, found["user"], self._place.address, self._server.host)
        self.root = self._place.folder
        return self._place

    def start(self, job: Job) -> bool:
        check_image(self._place.launcher, job)
        call = {
            "command": list(job.command),
            "environment": job_environment(job),
            "files": dict(job.files),
            "walls": before_command(job, self._place, PROGRAM),
        }
        return bool(self.ask("start", key=job.key, **call)["began"])

    def stage(self, key: str, program: str) -> str:
        return str(self.ask("stage", key=key, program=program)["path"])

    def foreground(self, job: Job, command: str) -> str:
        """Return what to run in a session on the server so that a text of the login shell runs as the job.

        Nothing but its own end, `terminate` and `stop` ends it.
        """
        call = {
            "root": self.root,
            "key": job.key,
            "command": command,
            "environment": job_environment(job),
            "walls": before_command(job, self._place, PROGRAM),
        }
        program = (
            f"{inspect.getsource(directory_job)}\nraise SystemExit(run(**json.loads({json.dumps(call)!r})))\n"
        )
        path = self.stage(job.key, program)
        return f"exec python3 -I -S {shlex.quote(path)}"

    def status(self, key: str) -> JobStatus:
        return status_of(self.ask("status", key=key))

    def logs(self, key: str, offset: int = 0) -> Output:
        found = self.ask("logs", key=key, offset=offset)
        return Output(found["text"], found["offset"], status_of(found["status"]), found["is_all"])

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
        """Do nothing: the connection is shared, and closed once it is idle."""

    @property
    def library(self) -> str:
        """The Python program that defines `answer`, which executes a call."""
        return inspect.getsource(directory_job)

    def ask(self, act: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of `directory_job` on the server; program and secrets go over standard input.

        Raises `LauncherUnreachableError` if the job's state is unknown, else `LauncherError`.
        """
        place = asdict(self._place) if self._place.machine else None
        call = json.dumps({"do": act, "place": place, "root": self.root, **arguments})
        # Such as on a server out of memory: the job may still run, unless nothing was to start.
        kind = LauncherError if act == "prepare" else LauncherUnreachableError
        try:
            exit_code, answer, complaint = self._server.run(
                f"answer(json.loads({call!r}))\n",
                ANSWER_TIMEOUT_S + arguments.get("wait_s", arguments.get("grace_s", 0.0)),
                self.library,
            )
        except LauncherUnreachableError:
            raise
        except LauncherError as error:
            raise kind(str(error)) from error
        key = arguments.get("key", directory_job.ANY)
        failed = f"server {self._server.host} could not {act} job {key}"
        if exit_code != 0:
            last = (complaint.strip().splitlines() or ["no reason given"])[-1]
            raise kind(f"{failed}: {last}")
        last = (answer.splitlines() or [""])[-1]  # the lines before it are a .bashrc's
        with suppress(ValidationError):
            refused = _Refused.model_validate_json(last)
            raise refusal(refused.refused, refused.reason, failed)
        try:
            return self.answers[act].model_validate_json(last).model_dump()
        except ValidationError as error:
            raise LauncherUnreachableError(
                f"server {self._server.host} answers to {act} of job {key} in an unknown form"
            ) from error


_shared: dict[tuple[str, str | None], SSHPython] = {}
"""Servers of this process by address and Airflow connection."""

_of_parent: list[SSHPython] = []
"""Servers of the process that this one was forked from, kept so that nothing is sent as they are removed."""


def _leave_to_parent() -> None:
    for server in _shared.values():
        server.disown()
    _of_parent.extend(_shared.values())
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _shared_server(address: str, ssh_conn_id: str | None) -> SSHPython:
    """Return the server, whose connections all that ask for it in this process share.

    Its Airflow connection is read now, if that is new, else at each log-in. Raises `LauncherError`.
    """
    key = (address, ssh_conn_id)
    if key not in _shared:
        read = [_airflow_hook(address, ssh_conn_id)]
        host = address or read[0].remote_host

        def connect() -> Any:
            hook = read.pop() if read else _airflow_hook(address, ssh_conn_id)
            return hook.get_conn()

        _shared.setdefault(key, SSHPython(host, connect))
    return _shared[key]


def _airflow_hook(address: str, ssh_conn_id: str | None) -> Any:
    """Return Airflow's hook, which has the credentials of its connections; raises `LauncherError`."""
    try:
        from airflow.providers.ssh.hooks.ssh import SSHHook
    except ImportError as error:
        raise LauncherError(f"ssh needs Airflow's SSH provider: {how_to_install('airflow-ssh')}") from error
    silence()
    user, host, port = parts_of(address)
    given: dict[str, Any] = {"remote_host": host, "username": user, "port": port}
    check_connection(ssh_conn_id, "ssh")
    try:
        return SSHHook(ssh_conn_id=ssh_conn_id, **{name: value for name, value in given.items() if value})
    except Exception as error:
        raise LauncherError(f"ssh connection {ssh_conn_id!r}: {error}") from error
