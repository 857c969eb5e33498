"""Launcher of jobs on servers reached by ssh; the jobs outlive the connection."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import ExitStack, suppress
from dataclasses import asdict
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from resource_manager.core.models import MAX_TIME_S, JobPlace
from resource_manager.errors import how_to_install
from resource_manager.jobs.directories.job_files import ANY, DEFAULT_ROOT, MAX_SHORT_BYTES
from resource_manager.jobs.launchers.base import (
    Job,
    JobState,
    LauncherError,
    LauncherUnreachableError,
    check_connection,
)
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.launchers.directory_launcher import (
    DirectoryLauncher,
    before_command,
    failure,
    kind_of_failure,
    refusal,
    time_for,
)
from resource_manager.jobs.launchers.plain_ssh import CONNECT_TIMEOUT_S, parts_of, silence
from resource_manager.jobs.launchers.server_library import library_of
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
    walls: str = Field(max_length=MAX_SHORT_BYTES)


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
        server = _shared_server(place.address, place.conn_id or None)
        verify = f"verify(ANY, json.loads({json.dumps(asdict(place))!r}))"
        looking = ExitStack()
        with server.reporting():
            lookout = looking.enter_context(server.lookout(place.folder, library_of(), verify))
        self.watch = server.reporting()(lookout.watch)
        self.forget = server.reporting()(lookout.forget)
        self.changed = server.reporting()(lookout.changed)
        self.close = looking.close


class SSHLauncher(DirectoryLauncher):
    """Launcher of jobs in directories of a server, which needs python3 (3.7 or newer) and nothing else.

    The place's address is `[user@]host[:port]`; missing parts and the credentials come from its connection,
    unless `server` is one that is reached in another way.
    """

    answers: ClassVar[dict[str, type[Answer]]] = ANSWERS
    modules: ClassVar[tuple[ModuleType, ...]] = ()
    """What is sent along for the calls, besides the modules for jobs in directories."""

    python = PROGRAM

    def __init__(self, place: JobPlace, server: PythonServer | None = None, root: str = DEFAULT_ROOT) -> None:
        if server is None:
            if not place.address and not place.conn_id:
                raise LauncherError(
                    "the ssh launcher has no address: set the server's address in the inventory, or "
                    "launcher_conn_id"
                )
            server = _shared_server(place.address, place.conn_id or None)
        super().__init__(place, root, server.host)
        self._server = server

    def foreground(self, job: Job, command: str) -> str:
        """Return what to run in a session on the server so that a text of the login shell runs as the job.

        Nothing but its own end, `terminate` and `stop` ends it.
        """
        call = {
            "root": self.root,
            "key": job.key,
            "command": command,
            "environment": job_environment(job),
            "walls": before_command(job, self._place, self.python),
        }
        program = f"raise SystemExit(run(**json.loads({json.dumps(call)!r})))"
        path = self.stage(job.key, f"{library_of()}{program}\n")
        return f"exec python3 -I -S {shlex.quote(path)}"

    def ask(self, act: str, **arguments: Any) -> dict[str, Any]:
        """Call it on the server; program and secrets go over standard input."""
        call = json.dumps({"do": act, "place": self.place_for(act), "root": self.root, **arguments})
        # Such as on a server out of memory: the job may still run, unless nothing was to start.
        kind = kind_of_failure(act)
        try:
            exit_code, answer, complaint = self._server.run(
                f"answer(json.loads({call!r}))\n", time_for(arguments), library_of(*self.modules)
            )
        except LauncherUnreachableError:
            raise
        except LauncherError as error:
            raise kind(str(error)) from error
        key = arguments.get("key", ANY)
        failed = failure(act, key, self.host)
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
                f"server {self.host} answers to {act} of job {key} in an unknown form"
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
    parts: dict[str, Any] = {"remote_host": host, "username": user, "port": port}
    given = {name: value for name, value in parts.items() if value}
    check_connection(ssh_conn_id, "ssh")
    try:
        hook: Any = SSHHook(ssh_conn_id=ssh_conn_id, **given)
    except Exception as error:
        raise LauncherError(f"ssh connection {ssh_conn_id!r}: {error}") from error
    if hook.conn_timeout is None:
        hook.conn_timeout = CONNECT_TIMEOUT_S  # without one it waits as long as TCP does: two minutes
    hook.conn_retry_attempts = 1  # who asks tries again; older providers try three times nonetheless
    return hook
