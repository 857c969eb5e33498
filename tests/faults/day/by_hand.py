"""Jobs of the day that people run from a terminal: `gpu-manager run`, repeated until the command succeeds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from resource_manager.cli.attended import PREEMPTED
from resource_manager.cli.base import UNREACHABLE
from resource_manager.core.changes import Change, Granted, Queued
from resource_manager.core.names import ALPHABET, short_id
from tests.faults.day import plan

BEAT = Path(__file__).parents[2] / "e2e" / "dags" / "beat.py"
SHORT_ID = re.compile(rf"\S+@\S+ ([{ALPHABET}]{{4,5}})\b")
MAX_TRIES = 6
AGAIN_S = 2.0


@dataclass(slots=True)
class Desk:
    """One person with one job: calls `run` until it succeeds.

    A job that was preempted costs no try, and a store that does not answer before there is a lease neither.
    """

    job: plan.DayJob
    environment: Mapping[str, str]
    ledger: Path
    folder: Path
    tries: int = 0
    state: str = "running"
    calls: int = 0
    short_ids: list[str] = field(default_factory=list)

    def work(self) -> None:
        """Run the job until it succeeds, or after `MAX_TRIES`."""
        while self.tries < MAX_TRIES:
            leases = len(self.short_ids)
            code = self._call()
            has_asked_in_vain = code == UNREACHABLE and len(self.short_ids) == leases
            self.tries += not (code == PREEMPTED or has_asked_in_vain)
            if code == 0:
                self.state = "success"
                return
            time.sleep(AGAIN_S)
        self.state = "failed"

    def _call(self) -> int:
        job = self.job
        saves = [f"SAVES_FOR_S={plan.SAVES_FOR_S}"] if job.preemptible else []
        words = [sys.executable, "-m", "resource_manager.cli", "run", "--gpus", str(job.gpus), "--cpus", "1"]
        words += ["--team", job.team, "--priority", str(job.priority)]
        words += [] if job.preemptible else ["--not-preemptible"]
        command = ["env", f"SAVES_TO={self.ledger}-{job.name}-0", "BEAT_S=1", "GPU_RESTART_COUNT=0", *saves]
        command += ["python3", str(BEAT), str(self.ledger), str(job.seconds), "0"]
        self.calls += 1
        said = self.folder / f"{job.name}-{self.calls}"
        with said.open("wb") as file:
            done = subprocess.run(
                [*words, "--", *command],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=False,
            )
        self.short_ids += dict.fromkeys(SHORT_ID.findall(said.read_text(errors="replace")))
        return done.returncode

    @property
    def task(self) -> dict[str, Any]:
        """The job's end as Airflow would tell it."""
        return {"state": self.state, "try_number": max(self.tries, 1), "unrecorded": []}


class Desks:
    """The people of the day; `ssh` is a program that logs in to every server with the fleet's key."""

    def __init__(self, environment: Mapping[str, str], ledger: Path, home: Path, key: Path) -> None:
        folder = home / "desks"
        (folder / "bin").mkdir(parents=True)
        ssh = folder / "bin" / "ssh"
        ssh.write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -i {key} -o User=root "
            '-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
        )
        ssh.chmod(0o755)
        self.environment = {**environment, "PATH": f"{ssh.parent}:{environment['PATH']}"}
        self._ledger, self._folder = ledger, folder
        self._desks: list[Desk] = []
        self._threads: list[threading.Thread] = []

    def begin(self, jobs: Iterable[plan.DayJob]) -> None:
        """Let people begin to run these jobs."""
        for job in jobs:
            desk = Desk(job, self.environment, self._ledger, self._folder)
            thread = threading.Thread(target=desk.work, daemon=True)
            self._desks.append(desk)
            self._threads.append(thread)
            thread.start()

    @property
    def have_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def stop_leases(self, lease_ids: Iterable[str]) -> None:
        """Stop what is left of leases, as an operator does once their servers can be reached again."""
        for lease_id in lease_ids:
            subprocess.run(
                [sys.executable, "-m", "resource_manager.cli", "stop", lease_id],
                env=self.environment,
                check=False,
                capture_output=True,
                timeout=120,
            )

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        return {desk.job.name: desk.task for desk in self._desks}

    def names(self, changes: Iterable[Change]) -> dict[str, str]:
        """Lease id -> a name that ends in that of its job, as those of Airflow's tasks do."""
        granted = (change.lease for change in changes if isinstance(change, Granted))
        lease_ids = {short_id(lease.sequence): lease.lease_id for lease in granted}
        return {
            lease_ids[each]: f"hand:day/{number}/{desk.job.name}"
            for desk in self._desks
            for number, each in enumerate(desk.short_ids)
            if each in lease_ids
        }


def renamed(change: Change, names: Mapping[str, str]) -> Change:
    """Return the change with the name of the lease's job in the place of its id."""
    if isinstance(change, Granted):
        request = change.lease.request
        named = request.for_task(names.get(request.lease_id, request.lease_id))
        return replace(change, lease=replace(change.lease, request=named))
    if isinstance(change, Queued):
        own = change.request.lease_id
        return replace(change, request=change.request.for_task(names.get(own, own)))
    if "lease_id" in {each.name for each in fields(change)}:  # that of an announcement is its request's
        own = change.lease_id  # type: ignore[union-attr]
        return replace(change, lease_id=names.get(own, own))  # type: ignore[call-arg]
    return change
