"""The servers of the day: a folder each, agents in a few processes, and what happens to them."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults.day.plan import GPUS, SERVERS, WORKER_GPUS, WORKERS, name_of, uuids_of

AGENTS_OF_PROCESS = 10

SERVER = """
[[servers]]
name = "{name}"
cpus = 64
address = "{address}"
job_user = "{user}"
[[servers.gpus]]
ids = {ids}
type = "A100"
uuids = {uuids}
"""

WORKERS_SERVER = f"""
[[servers]]
name = "{WORKERS}"
cpus = 64
gpus = {WORKER_GPUS}
gpu_type = "local"
"""
"""The machine of Airflow's workers, in which `with_gpus` and `@task.gpu` compute."""


class Fleet:
    """Servers that nobody logs in to, and that can be cut off, lose a GPU or vanish."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for number in range(SERVERS):
            self.folder(number).mkdir(parents=True)
        self.gpus = {number: set(range(GPUS)) for number in range(SERVERS)}
        self.vanished: set[int] = set()
        self.out_of_reach: set[int] = set()
        self._agents: dict[range, subprocess.Popen[bytes]] = {}

    def folder(self, server: int) -> Path:
        return self.home / name_of(server)

    def inventory(self) -> str:
        """Return the fleet as a template, in which `str.format` finds nothing to fill in."""
        servers = (
            SERVER.format(
                name=name_of(number),
                address=f"127.0.77.{number + 1}:1",
                user=getpass.getuser(),
                ids=list(range(GPUS)),
                uuids=str(uuids_of(number)).replace("'", '"'),
            )
            for number in range(SERVERS)
        )
        return "".join([*servers, WORKERS_SERVER])

    def give_tokens(self, tokens: Sequence[str]) -> None:
        for number, token in enumerate(tokens):
            (self.folder(number) / "token").write_text(token)

    def start(self, url: str) -> None:
        """Start the agents of all servers that are there, or start them again."""
        self.stop()
        for first in range(0, SERVERS, AGENTS_OF_PROCESS):
            some = range(first, min(first + AGENTS_OF_PROCESS, SERVERS))
            words = [str(number) for number in some if number not in self.vanished]
            program = [sys.executable, "-m", "tests.faults.day.agents", str(self.home), url, *words]
            with (self.home / f"agents-{first}.log").open("ab") as log:
                self._agents[some] = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_own_environment()
                )

    def lose_gpu(self, server: int, number: int) -> None:
        """Let a GPU fall off the bus: reports show it no more."""
        self.gpus[server].discard(number)
        lost = {*range(GPUS)} - self.gpus[server]
        (self.folder(server) / "lost").write_text(" ".join(map(str, sorted(lost))))

    def vanish(self, server: int) -> None:
        """Kill everything that runs on a server; nothing is heard of it any more."""
        self.vanished.add(server)
        (self.folder(server) / "cut").touch()
        self._kill_jobs(f"{self.folder(server)}/")

    def cut(self, server: int) -> None:
        """Let nothing from a server through; what runs there goes on."""
        self.out_of_reach.add(server)
        (self.folder(server) / "cut").touch()

    def join(self, server: int) -> None:
        """Undo `cut`."""
        (self.folder(server) / "cut").unlink()
        self.out_of_reach.discard(server)

    def stop(self) -> None:
        """End the agents; the jobs go on."""
        for process in self._agents.values():
            process.kill()
        for process in self._agents.values():
            process.wait()
        self._agents.clear()

    def close(self) -> None:
        """End the agents and all jobs."""
        self.stop()
        self._kill_jobs(f"{self.home}/")

    def _kill_jobs(self, folder: str) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("GPU_JOB_LOCK", "").startswith(folder):
                    process.kill()


def _own_environment() -> dict[str, str]:
    """Return what an agent is given: nothing of the store."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("GPU_", "AIRFLOW"))}
