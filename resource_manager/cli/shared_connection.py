"""One log-in by the ssh program for all that a command does on a server: a password is asked for once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from resource_manager.cli.signals import Signals
from resource_manager.jobs.launchers import LauncherError, LauncherUnreachableError
from resource_manager.jobs.launchers.terminal import SSH_OPTIONS, destination

LOOK_EVERY_S = 0.05
CLOSE_S = 1.0

DIES_WITH_ITS_PARENT = """
import ctypes, os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that becomes the command in its arguments; SIGTERM comes once its parent, named first, is gone.

Ctrl-C or a closed terminal ends it through its parent, which still has to end its job by the connection.
"""


class SharedConnection:
    """Log-in to `[user@]host[:port]`, which other calls of the ssh program share by its `options`."""

    def __init__(self, address: str, signals: Signals) -> None:
        self._address = address
        self._signals = signals
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-manager-"))
        self._socket = self._folder / "ssh"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the ssh program for what shares the log-in."""
        return ("-o", "ControlMaster=no", "-o", f"ControlPath={self._socket}")

    def __enter__(self) -> Self:
        """Log in, with the questions of the ssh program in the terminal.

        Raises `LauncherUnreachableError` with its reason, and `Interrupted` at a signal.
        """
        try:
            self._log_in()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Log out; what still shares the connection ends."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log_in(self) -> None:
        if shutil.which("ssh") is None:
            raise LauncherError("the ssh program is not installed here")
        sharing = ("-o", "ControlMaster=yes", "-o", f"ControlPath={self._socket}", "-o", "ControlPersist=no")
        ssh = ["ssh", "-N", *sharing, "-o", "ConnectTimeout=10", *SSH_OPTIONS, *destination(self._address)]
        complaint = self._folder / "complaint"
        with complaint.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", DIES_WITH_ITS_PARENT, str(os.getpid()), *ssh],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        while not self._socket.exists():
            if self._process.poll() is not None:
                said = complaint.read_text(errors="replace").strip().splitlines() or ["no reason given"]
                raise LauncherUnreachableError(f"server {self._address} does not answer by ssh: {said[-1]}")
            self._signals.pause(LOOK_EVERY_S)
