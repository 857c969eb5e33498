"""Job in the caller's terminal: here, or on its server by the ssh program, where any process finds it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from selectors import EVENT_READ, DefaultSelector
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from typing import Protocol

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import job_files
from resource_manager.jobs.directories.attending import is_interactive
from resource_manager.jobs.launchers.base import Job, Launcher, LauncherError, LauncherUnreachableError
from resource_manager.jobs.launchers.devices import job_environment
from resource_manager.jobs.launchers.directory_launcher import DirectoryLauncher, before_command
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.launchers.plain_ssh import parts_of
from resource_manager.jobs.launchers.server_library import library_of
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.jobs.launchers.ssh_python import PYTHON
from resource_manager.jobs.launchers.ssh_standing import MAX_ANSWER_BYTES, PROGRAM

OWN_SERVER = "GPU_MANAGER_SERVER"
"""Environment variable with the name of the server that this machine is."""

SSH_OPTIONS = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
"""A connection without an answer for 30 s is over: the lease of its job lives for a minute."""

SSH_FAILED = 255


class SSHProgram:
    """Connection by the ssh program, with its configuration, keys and agent, that runs Python programs.

    Further `options` of the program may let it share a log-in.
    """

    def __init__(self, address: str, options: Sequence[str] = ()) -> None:
        self.host = address
        self._destination = [*options, *destination(address)]

    def run(self, program: str, timeout_s: float, library: str = "") -> tuple[int, str, str]:
        """Run a program, sent over standard input; return exit code, output and standard error.

        Raises `LauncherUnreachableError` if nobody knows how it ended.
        """
        command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *self._destination, PYTHON]
        try:
            exit_code, answer, complaint = _talk(command, f"{library}\n{program}", timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LauncherUnreachableError(f"server {self.host} does not answer by ssh: {error}") from error
        if exit_code == SSH_FAILED:
            said = (complaint.strip().splitlines() or ["no reason given"])[-1]
            raise LauncherUnreachableError(f"server {self.host} does not answer by ssh: {said}")
        return exit_code, answer, complaint


def _talk(command: Sequence[str], given: str, timeout_s: float) -> tuple[int, str, str]:
    """Run a command with that input, which no Ctrl-C reaches; return exit code, output and standard error.

    Raises `OSError` if it says more than `MAX_ANSWER_BYTES` or does not end in time.
    """
    deadline = time.monotonic() + timeout_s
    with TemporaryFile() as file, DefaultSelector() as selector:
        file.write(given.encode())
        file.seek(0)
        with Popen(command, stdin=file, stdout=PIPE, stderr=PIPE, start_new_session=True) as process:
            said = {stream: bytearray() for stream in (process.stdout, process.stderr) if stream is not None}
            try:
                for stream in said:
                    selector.register(stream, EVENT_READ, said[stream])
                while selector.get_map():
                    ready = selector.select(max(deadline - time.monotonic(), 0.0))
                    if not ready:
                        raise TimeoutError(f"no answer within {timeout_s:g} s")
                    for key, _ in ready:
                        if not (piece := os.read(key.fd, 64 * 1024)):
                            selector.unregister(key.fileobj)
                        key.data.extend(piece)
                        if len(key.data) > MAX_ANSWER_BYTES:
                            raise OSError(f"it sends more than {MAX_ANSWER_BYTES:,} bytes")
                exit_code = process.wait(timeout_s)
            finally:
                process.kill()
    answer, complaint = (text.decode(errors="replace") for text in said.values())
    return exit_code, answer, complaint


class SignedLauncher(Launcher, Protocol):
    """Launcher of a job that ends if it hears nothing of its caller."""

    def sign(self, key: str) -> None:
        """Tell the job that its caller is there; `attend` ends it after `ttl_s` without."""


def open_terminal(
    place: JobPlace, here: bool | None = None, options: Sequence[str] = ()
) -> DirectoryLauncher:
    """Return the launcher of jobs in a terminal at that place, or at its address if none was prepared yet.

    It looks on this machine if the place is here, which `here` may say; else by the ssh program with these
    further options.
    """
    if here is None:
        here = place.machine == job_files.machine() if place.machine else is_here(place.address)
    if here:
        return LocalLauncher(place=place)
    if not place.address:
        raise LauncherUnreachableError(
            f"the job runs in a terminal of {place.machine.partition('/')[0]}, which has no address in the "
            "inventory: ask from there"
        )
    return SSHLauncher(place, SSHProgram(place.address, options))


def attend(
    place: JobPlace,
    job: Job,
    here: bool,
    ttl_s: float = 0.0,
    options: Sequence[str] = (),
    working_dir: str = "",
) -> subprocess.Popen[bytes]:
    """Start the job, prepared at that place, in this terminal; it ends if this process does.

    It also ends `ttl_s` after the last `sign`, if that is not 0. It gets no input from a terminal unless
    output goes to one, in whose foreground this process is. By the ssh program it has these further
    options. It begins in `working_dir`, else here in this folder, there at home. The exit code is the job's.
    Raises `LauncherError`.
    """
    if working_dir:  # the job's own, within walls, too
        job = replace(job, writable=(*job.writable, working_dir))
    call = {
        "place": asdict(place),
        "root": place.folder,
        "key": job.key,
        "command": list(job.command),
        "walls": before_command(job, place, sys.executable if here else PROGRAM),
        "environment": job_environment(job),
        "working_dir": working_dir or ("." if here else "~"),
        "ttl_s": ttl_s,
    }
    program = (
        f"{library_of()}os.unlink(sys.argv[0])\n"
        f"raise SystemExit(attend_or_say(**json.loads({json.dumps(call)!r})))\n"
    )
    # In a file of the job's own folder: standard input is the terminal's, and all users read command lines.
    with closing(open_terminal(place, here, options)) as launcher:
        path = launcher.stage(job.key, program)
    if here:
        command = [sys.executable, "-I", "-S", path]
    else:
        remote = f"exec {shlex.join(['python3', '-I', '-S', path])}"
        no_input = ["-n"] if os.isatty(0) else []  # else ssh would read what is typed for another program
        way = ["-t"] if is_interactive() else ["-T", *no_input]
        command = ["ssh", *way, *SSH_OPTIONS, *options, *destination(place.address), remote]
    try:
        return subprocess.Popen(command)
    except OSError as error:
        raise LauncherError(f"{command[0]} cannot be started: {error}") from error


def destination(address: str) -> list[str]:
    """Return the arguments of the ssh program for `[user@]host[:port]`; raises `LauncherError`."""
    user, host, port = parts_of(address)
    if not host or host.startswith("-"):
        raise LauncherError(f"address {address!r} names no host")
    return [*(["-p", str(port)] if port else []), "--", f"{user}@{host}" if user else host]


def is_here(address: str, server: str = "", machine: str | None = None) -> bool:
    """Return True if that server is this machine.

    It is if `GPU_MANAGER_SERVER` names it, else if its agent reports this `machine` or, where none reports,
    if the server has no address, or one of this machine's.
    """
    own_server = os.environ.get(OWN_SERVER)
    if own_server and server:
        return own_server == server
    if not address:
        return machine in (None, job_files.machine())
    _, host, port = parts_of(address)
    if host is None or port not in (None, 22):
        return False
    if machine is not None:
        return machine == job_files.machine()
    return host == socket.gethostname() or any(map(_is_own, _addresses(host)))


def own_name() -> str:
    """Return the name of the server that this machine is said to be, else its host name."""
    own_server = os.environ.get(OWN_SERVER)
    return f"{own_server} ({OWN_SERVER})" if own_server else socket.gethostname()


def _is_own(address: str) -> bool:
    """Return whether an interface of this machine has the address: only then a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as tried:
        tried.bind((address, 0))
        return True
    return False


def _addresses(host: str) -> set[str]:
    with suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return set()
