"""Launcher of jobs on servers reached by ssh; the jobs outlive the connection."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from resource_manager.core.models import JobPlace
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
)
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.launchers.local import (
    before_command,
    check_of,
    check_user,
    placed,
    refusal,
    status_of,
    walls_of,
)
from resource_manager.jobs.launchers.plain_ssh import parts_of, plain_connection, silence
from resource_manager.jobs.launchers.ssh_connections import SSHConnections

PROGRAM = "python3"

PYTHON = f"{PROGRAM} -I -S -"
"""Command that runs a program from standard input, without what else is installed: fast, always alike."""

PYTHON_OF_LENGTH = (
    "python3 -I -S -c 'import os\np = b\"\"\nwhile len(p) < {0}: p += os.read(0, {0} - len(p))\nexec(p)'"
)
"""Command that runs a program of that many bytes from standard input, which goes on after it."""

MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Most bytes that are read of a program's output: a job may have put another in its account."""


class Answer(BaseModel):
    """What a server answers; each kind of call has a form of its own."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StatusAnswer(Answer):
    state: JobState
    exit_code: int | None
    ended_at: float | None
    checkpoint_at: float | None
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


class PythonServer(Protocol):
    """Server that runs Python programs."""

    host: str

    def run(self, program: str, timeout_s: float) -> tuple[int, str, str]:
        """Run a program; return exit code, output and standard error, or raise `LauncherError`."""

    def close(self) -> None:
        """Close the connection."""


class SSHPython:
    """Server that runs Python programs by ssh; it needs python3 and no more.

    `address` is `[user@]host[:port]`. The connections, if they are not shared with others, need no Airflow
    and log in as `user` (unless the address names one) with `key_file`.
    """

    def __init__(
        self,
        address: str,
        *,
        user: str | None = None,
        key_file: str | None = None,
        shared: SSHConnections | None = None,
    ) -> None:
        self.host = address
        self._is_shared = shared is not None
        self._connections = shared or SSHConnections(address, plain_connection(address, user, key_file))

    def run(self, program: str, timeout_s: float) -> tuple[int, str, str]:
        """Run a program, sent over standard input; return exit code, output and standard error.

        Raises `LauncherUnreachableError` if nobody knows how it ended, `LauncherError` without python3.
        """
        deadline = time.monotonic() + timeout_s
        with self._reporting(), self._connections.session() as channel:
            channel.settimeout(timeout_s)
            channel.exec_command(PYTHON)
            channel.sendall(program.encode())
            channel.shutdown_write()
            answer, complaint = (
                _read(channel, each, deadline) for each in (channel.recv, channel.recv_stderr)
            )
            if not channel.status_event.wait(max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError("it does not say how the program ended")
            exit_code = channel.recv_exit_status()
            # One that a signal ended has no exit code either, but its output came to an end.
            if exit_code < 0 and not (channel.eof_received and channel.get_transport().is_active()):
                raise EOFError("the connection was over before the program")
        if exit_code == 127:
            raise LauncherError(f"server {self.host} has no python3, which is needed there")
        return exit_code, answer, complaint

    @contextmanager
    def running(self, program: str) -> Iterator[Any]:
        """Yield the channel of a program that goes on reading standard input; it ends with the block.

        Raises `LauncherUnreachableError`.
        """
        source = program.encode()
        with self._reporting(), self._connections.session() as channel:
            channel.settimeout(ANSWER_TIMEOUT_S)
            channel.exec_command(PYTHON_OF_LENGTH.format(len(source)))
            channel.sendall(source)
            yield channel

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except LauncherError:
            raise
        except Exception as error:  # paramiko's exceptions have no common base
            reason = str(error) or type(error).__name__
            raise LauncherUnreachableError(f"server {self.host} does not answer by ssh: {reason}") from error

    def close(self) -> None:
        """Close the connections, unless others share them."""
        if not self._is_shared:
            self._connections.close()


class SSHSignals:
    """Standing look at the jobs of a place over one connection, by a program that writes a line for each."""

    def __init__(self, place: JobPlace) -> None:
        server = _shared_server(place.address, place.conn_id or None)
        self._host = server.host
        call = json.dumps({"root": place.folder, "place": asdict(place)})
        program = f"{inspect.getsource(directory_job)}\nfollow(**json.loads({call!r}))\n"
        self._running = ExitStack()
        self._channel = self._running.enter_context(server.running(program))
        self._begun = b""
        self._heard_at = time.monotonic()

    def watch(self, key: str) -> None:
        self._say(f"+{key}\n")

    def forget(self, key: str) -> None:
        self._say(f"-{key}\n")

    def changed(self, timeout_s: float) -> set[str]:
        self._channel.settimeout(timeout_s)
        try:
            data = self._channel.recv(64 * 1024)
        except TimeoutError:
            if time.monotonic() - self._heard_at > 3 * directory_job.HEARTBEAT_S:
                raise LauncherUnreachableError(f"server {self._host} is silent") from None
            return set()
        except Exception as error:
            raise LauncherUnreachableError(f"server {self._host} is lost: {error}") from error
        if not data:
            raise LauncherUnreachableError(f"server {self._host} ended the look at its jobs")
        self._heard_at = time.monotonic()
        *lines, begun = (self._begun + data).split(b"\n")
        self._begun = begun[-directory_job.MAX_SHORT_BYTES :]
        return {line.decode(errors="replace") for line in lines}

    def close(self) -> None:
        self._running.close()

    def _say(self, line: str) -> None:
        try:
            self._channel.settimeout(ANSWER_TIMEOUT_S)
            self._channel.sendall(line.encode())
        except Exception as error:
            raise LauncherUnreachableError(f"server {self._host} is lost: {error}") from error


def _read(channel: Any, receive: Callable[[int], bytes], deadline: float) -> str:
    """Return all that one of the channel's streams gives; raises `OSError` if it is too much or too late."""
    data = bytearray()
    while len(data) <= MAX_ANSWER_BYTES:
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = receive(64 * 1024)
        if not piece:
            return data.decode(errors="replace")
        data += piece
    raise OSError(f"it sends more than {MAX_ANSWER_BYTES:,} bytes")


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
        self._place = placed(self._place, found, walls_of(job, found, self._server.host))
        check_user(job, found["user"], self._place.address, self._server.host)
        self.root = self._place.folder
        return self._place

    def start(self, job: Job) -> bool:
        check_image(self._place.launcher, job)
        command = [*before_command(job, self._place, PROGRAM), *job.command]
        call = {"command": command, "environment": job_environment(job), "files": dict(job.files)}
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
        self._server.close()

    def program(self, call: str) -> str:
        """Return the Python program that executes a call, which is JSON."""
        return f"{inspect.getsource(directory_job)}\nanswer(json.loads({call!r}))\n"

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
                self.program(call),
                ANSWER_TIMEOUT_S + arguments.get("wait_s", arguments.get("grace_s", 0.0)),
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


_shared: dict[tuple[str, str | None], SSHConnections] = {}
"""Connections of this process by address and Airflow connection."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.clear)  # they are the parent's


def _shared_server(address: str, ssh_conn_id: str | None) -> SSHPython:
    """Return the server, whose connections all that ask for it in this process share.

    Its Airflow connection is read at each log-in. Raises `LauncherError`.
    """
    key = (address, ssh_conn_id)
    if key not in _shared or not _shared[key].is_open:
        hook = _airflow_hook(address, ssh_conn_id)
        host = address or hook.remote_host
        _shared.setdefault(key, SSHConnections(host, lambda: _airflow_hook(address, ssh_conn_id).get_conn()))
    return SSHPython(_shared[key].host, shared=_shared[key])


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
