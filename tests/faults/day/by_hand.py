"""Jobs of the day that people run from a terminal, by `gpu-manager run` and `submit`, until they succeed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from resource_manager import GPUResourceManager
from resource_manager.cli.base import UNREACHABLE
from resource_manager.cli.endings import PREEMPTED
from resource_manager.core.changes import Change, Granted, Outcome, Queued
from resource_manager.core.names import ALPHABET, short_id
from resource_manager.errors import ResourceManagerError
from tests.faults.day import plan
from tests.faults.day.forked import ForkedProgram

BEAT = Path(__file__).parents[2] / "e2e" / "dags" / "beat.py"
SHORT_ID = re.compile(rf"^gpu-manager: \S+@\S+ ([{ALPHABET}]{{4,5}})\b", re.MULTILINE)
"""Short id of a command's own request; the reasons of its wait name those of others."""
PROGRAM = (sys.executable, "-m", "resource_manager.cli")
MAX_TRIES = 6
AGAIN_S = 2.0
LOST_S = 60.0
"""Time after which a job that neither waits, runs nor has ended counts as lost, and is submitted again."""


class Present:
    """Ids of the leases and pending requests, which all desks read at once, every `AGAIN_S`."""

    def __init__(self, manager: GPUResourceManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._read_at = -AGAIN_S

    def __contains__(self, lease_id: str) -> bool:
        with self._lock:
            if time.monotonic() - self._read_at >= AGAIN_S:
                leases, queue = self._manager.leases(), self._manager.queue()
                self._ids = {entry["task_id"] for entry in (*leases, *queue)}
                self._read_at = time.monotonic()
            return lease_id in self._ids


@dataclass(slots=True)
class Desk:
    """One person with one job, who asks until it succeeds.

    A job that was preempted costs no try, and a service that does not answer before there is a lease neither.
    """

    job: plan.DayJob
    environment: Mapping[str, str]
    ledger: Path
    folder: Path
    manager: GPUResourceManager
    present: Present
    has_ended: Callable[[], bool]
    program: Callable[[Sequence[str], Mapping[str, str], Path], ForkedProgram] = ForkedProgram
    tries: int = 0
    state: str = "running"
    calls: int = 0
    short_ids: list[str] = field(default_factory=list)
    submitted_at: list[float] = field(default_factory=list)
    process: ForkedProgram | None = None

    def work(self) -> None:
        """Have the job done, or give up after `MAX_TRIES`."""
        act = self._submit if self.job.way == "submit" else self._run
        while self.tries < MAX_TRIES and not self.has_ended():
            if act():
                self.state = "success"
                return
            time.sleep(AGAIN_S)
        self.state = "failed"

    def _run(self) -> bool:
        leases = len(self.short_ids)
        variables = [f"{name}={text}" for name, text in self._variables.items()]
        code, said = self._call(
            "run", *self._options, "--", "env", "GPU_RESTART_COUNT=0", *variables, *self._command
        )
        self.short_ids += dict.fromkeys(SHORT_ID.findall(said))
        has_asked_in_vain = code == UNREACHABLE and len(self.short_ids) == leases
        self.tries += not (code == PREEMPTED or has_asked_in_vain)
        return code == 0

    def _submit(self) -> bool:
        variables = [word for each in self._variables.items() for word in ("-e", "=".join(each))]
        options = [*self._options, "--nodes", str(self.job.nodes), "--preempt-grace", f"{plan.GRACE_S:g}s"]
        options += ["--expected-runtime", f"{self.job.seconds:g}s"] if self.job.states_runtime else []
        code, _ = self._call("submit", *options, *variables, self.job.name, "--", *self._command)
        if code:
            self.tries += code != UNREACHABLE
            return False
        self.tries += 1
        self.submitted_at.append(time.time())
        return self._end() == Outcome.SUCCESS

    def _end(self) -> str:
        """Return the outcome of the job once it is over, or nothing once it is lost."""
        seen_at = time.monotonic()
        while time.monotonic() - seen_at < LOST_S and not self.has_ended():
            try:
                # A job that goes from the queue to a lease while both are read is in neither.
                is_present = self.job.name in self.present or bool(self.manager.status_of(self.job.name))
                result = None if is_present else self.manager.result_of(self.job.name)
            except ResourceManagerError:
                is_present, result = True, None
            if is_present:
                seen_at = time.monotonic()
            elif result is not None:
                return result["outcome"]
            time.sleep(AGAIN_S)
        return ""

    @property
    def _options(self) -> list[str]:
        job = self.job
        words = ["--gpus", str(job.gpus), "--cpus", "1", "--gpu-type", "A100", "--team", job.team]
        words += ["--priority", str(job.priority)]
        return words if job.preemptible else [*words, "--not-preemptible"]

    @property
    def _variables(self) -> dict[str, str]:
        saves = {"SAVES_FOR_S": str(plan.SAVES_FOR_S)} if self.job.preemptible else {}
        # Servers share the folder of the ledger, as by a network file system.
        return {"SAVES_TO": f"{self.ledger}-{self.job.name}", "BEAT_S": "1", **saves}

    @property
    def _command(self) -> list[str]:
        return ["python3", str(BEAT), str(self.ledger), str(self.job.seconds), "0"]

    def _call(self, *words: str) -> tuple[int, str]:
        self.calls += 1
        said = self.folder / f"{self.job.name}-{self.calls}"
        self.process = self.program(words, self.environment, said)
        return self.process.wait(), said.read_text(errors="replace")

    @property
    def task(self) -> dict[str, Any]:
        """The job's end as Airflow would tell it."""
        tries = max(self.tries, 1)
        return {"state": self.state, "try_number": tries, "unrecorded": [], "submitted_at": self.submitted_at}


class Desks:
    """The people of the day, who know the service, each with a token; an operator has the last one."""

    def __init__(
        self,
        environment: Mapping[str, str],
        ledger: Path,
        home: Path,
        manager: GPUResourceManager,
        url: str,
        tokens: Sequence[str],
    ) -> None:
        self._folder = home / "desks"
        self._folder.mkdir()
        own = {name: text for name, text in environment.items() if not name.startswith(("GPU_", "AIRFLOW"))}
        *people, self._operator = [
            {**own, "GPU_MANAGER_URL": url, "GPU_MANAGER_TOKEN": token} for token in tokens
        ]
        self._people = cycle(people)
        self._ledger, self._manager, self._present = ledger, manager, Present(manager)
        self._over = threading.Event()
        self._desks: list[Desk] = []
        self._threads: list[threading.Thread] = []

    def begin(self, jobs: Iterable[plan.DayJob]) -> None:
        """Let people begin to ask for these jobs."""
        for job in jobs:
            desk = Desk(
                job,
                next(self._people),
                self._ledger,
                self._folder,
                self._manager,
                self._present,
                self._over.is_set,
            )
            thread = threading.Thread(target=desk.work, daemon=True)
            self._desks.append(desk)
            self._threads.append(thread)
            thread.start()

    @property
    def have_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """Ask no more, and end the commands that are left."""
        self._over.set()
        for desk in self._desks:
            if desk.process is not None:
                desk.process.kill()

    def stop_leases(self, lease_ids: Iterable[str]) -> None:
        """Stop what is left of leases, as an operator does once their servers can be reached again."""
        for lease_id in lease_ids:
            with suppress(subprocess.TimeoutExpired):  # then it is left over, which the proof finds
                subprocess.run(
                    [*PROGRAM, "stop", lease_id],
                    env=self._operator,
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
    unnamed: Any = change
    if "lease_id" in {each.name for each in fields(change)}:  # that of an announcement is its request's
        unnamed = replace(unnamed, lease_id=names.get(unnamed.lease_id, unnamed.lease_id))
    return unnamed
