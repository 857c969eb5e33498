"""The processes under test: workers of this or another version, and services."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

import httpx

from tests.faults.redis_servers import free_port
from tests.faults.worker import LOCK_TIMEOUT_S, Assignment, main

ROOT = Path(__file__).parents[2]

OTHER_VERSION = """\
import runpy, sys
sys.path.insert(0, {other!r})
import resource_manager
assert resource_manager.__file__.startswith({other!r}), resource_manager.__file__
sys.path[0] = {root!r}
runpy.run_module("tests.faults.worker", run_name="__main__")
"""


def signalled(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class Process(ABC):
    """A worker, or a service."""

    @abstractmethod
    def exitcode(self) -> int | None:
        """None while it lives; minus the signal that killed it."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Sends that signal, if there is anybody to send it to."""

    def runs(self) -> bool:
        """Return True if there is a process to stop or kill."""
        return self.exitcode() is None

    def kill(self) -> None:
        if self.runs():
            self.signal(signal.SIGKILL)
        self.wait(10)

    def wait(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while self.exitcode() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.exitcode()


class Child(Process):
    """A process that was started here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def signal(self, number: signal.Signals) -> None:
        signalled(self.pid, number)


class Forked(Child):
    def __init__(self, assignment: Assignment) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=main, args=(assignment,), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        super().__init__(self._process.pid)

    def exitcode(self) -> int | None:
        return self._process.exitcode


class Command(Child):
    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: IO[bytes] | int = subprocess.DEVNULL
    ) -> None:
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=ROOT, stdout=log, stderr=log
        )
        super().__init__(self._process.pid)

    def exitcode(self) -> int | None:
        return self._process.poll()


def of_other_version(assignment: Assignment, other: Path, errors: Path) -> Child:
    """A worker that runs this test on the package in another checkout."""
    program = OTHER_VERSION.format(other=str(other), root=str(ROOT))
    with errors.open("ab") as log:
        return Command([sys.executable, "-c", program, json.dumps(asdict(assignment))], {}, log)


class Service:
    """`gpu-manager serve` on one port, to be started again after its death."""

    def __init__(self, store: str, folder: Path, stop: Path, halts: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._store = store
        self._stop, self._halts = stop, halts
        self._folder = folder
        folder.mkdir(parents=True)
        self.start()

    def start(self, halts_at: tuple[str, int, float] | None = None) -> None:
        environment = {
            "GPU_MANAGER_LOCK_TIMEOUT_S": str(LOCK_TIMEOUT_S),
            "GPU_MANAGER_TOKENS": str(self._folder / "tokens.json"),
        }
        command = [sys.executable, "-m", "tests.faults.service", json.dumps(halts_at)]
        command += [str(self._halts), str(self._stop), "--store", self._store, "serve"]
        with (self._folder / "log").open("ab") as log:
            self.process = Command([*command, "--port", str(self.port)], environment, log)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/healthz", timeout=5)
                return
            except httpx.HTTPError:
                time.sleep(0.05)
        raise RuntimeError(f"the service did not start: {(self._folder / 'log').read_text()[-500:]}")
