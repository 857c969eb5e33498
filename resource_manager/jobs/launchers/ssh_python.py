"""Python on a server by ssh: one program stands there and runs what it is sent, over one log-in.

A log-in takes longer than most calls, and the start of a Python as long again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from resource_manager.jobs.launchers.base import LauncherError, LauncherUnreachableError, NoAnswerError
from resource_manager.jobs.launchers.plain_ssh import plain_connection
from resource_manager.jobs.launchers.ssh_standing import (
    ANSWER_S,
    PROGRAM,
    Ended,
    Lookout,
    LostError,
    StandingProgram,
    failure_of,
)

PYTHON = f"{PROGRAM} -I -S -"
"""Command that runs a program from standard input, without what else is installed: fast, always alike."""


class PythonServer(Protocol):
    """Server that runs Python programs."""

    host: str

    def run(self, program: str, timeout_s: float, library: str = "") -> tuple[int, str, str]:
        """Run a program after its library; return exit code, output and standard error.

        Raises `LauncherUnreachableError` if nobody knows how it ended, or `LauncherError`.
        """


class SSHPython:
    """Server that runs Python programs by ssh; it needs python3, 3.7 or newer, and no more.

    `address` is `[user@]host[:port]`. Without `connect`, which logs in and returns paramiko's client, it
    needs no Airflow and logs in as `user` (unless the address names one) with `key_file`.
    """

    def __init__(
        self,
        address: str,
        connect: Callable[[], Any] | None = None,
        *,
        user: str | None = None,
        key_file: str | None = None,
    ) -> None:
        self.host = address
        self._connect = connect or plain_connection(address, user, key_file)
        self._lock = threading.Lock()
        self._standing: dict[str, Future[StandingProgram]] = {}

    def run(self, program: str, timeout_s: float, library: str = "") -> Ended:
        """Run a program as `PythonServer` does; one that was lost with an older log-in may run twice.

        Raises `LauncherUnreachableError` if nobody knows how it ended, `LauncherError` without python3.
        """
        with self.reporting():
            while True:
                standing, is_new = self._stands(library)
                try:
                    return standing.run(program, timeout_s)
                except LostError as lost:
                    if not is_new:
                        continue
                    if lost.ended is None:
                        raise
                    if lost.ended.code == 127:
                        reason = f"server {self.host} has no python3, which is needed there"
                        raise LauncherError(reason) from lost
                    return lost.ended

    @contextmanager
    def lookout(self, root: str, library: str, verify: str) -> Iterator[Lookout]:
        """Yield a standing look at jobs; the program `verify` fails if the folder is not the right one."""
        standing, _ = self._stands(library)
        code, _, complaint = standing.run(verify, ANSWER_S)
        if code:
            last = (complaint.strip().splitlines() or ["no reason given"])[-1]
            raise LauncherUnreachableError(f"server {self.host}: {last}")
        with standing.lookout(root) as lookout:
            yield lookout

    def close(self) -> None:
        """Close the connections."""
        for standing in self._programs():
            standing.close()

    def disown(self) -> None:
        """Send nothing more from this process, which was forked: the connections are its parent's."""
        for standing in self._programs():
            standing.disown()

    def _programs(self) -> list[StandingProgram]:
        return [each.result() for each in self._standing.values() if each.done() and not each.exception()]

    def _stands(self, library: str) -> tuple[StandingProgram, bool]:
        """Return the standing program with this library, and whether it was made for that: one at a time."""
        with self._lock:
            found = self._standing.get(library)
            is_new = found is None or (found.done() and not found.result().is_usable)
            if found is None or is_new:
                found = self._standing[library] = Future()
        if not is_new:
            return found.result(), False
        try:
            with self.reporting(NoAnswerError):
                standing = StandingProgram(self._connect, library)
        except BaseException as error:
            with self._lock:
                del self._standing[library]
            found.set_exception(error)
            raise
        found.set_result(standing)
        return standing, True

    @contextmanager
    def reporting(self, kind: type[LauncherError] = LauncherUnreachableError) -> Iterator[None]:
        """Raise an error of that kind for what is not a `LauncherError`."""
        try:
            yield
        except LauncherError:
            raise
        except Exception as error:  # paramiko's exceptions have no common base
            reason = f"server {self.host} does not answer by ssh: {failure_of(error)}"
            raise kind(reason) from error
