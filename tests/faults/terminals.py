"""Jobs in terminals, on servers that die and are cut off, and proof that no GPU is given away meanwhile.

A course is seeded: people call `gpu-manager run` again and again, others `stop` and `release` what they find,
also with another home and folder of jobs, while servers, callers, jobs and the store are hurt. The jobs write
down five times a second on which GPUs they run: the ledger is compared with the grants of the history.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from resource_manager import GPUResourceManager
from resource_manager.core.changes import Change, Granted, Outcome, Released
from resource_manager.core.names import ALPHABET, short_id
from resource_manager.errors import ResourceManagerError
from tests.faults.bugs import BUGS
from tests.faults.machines import Machine, Machines, Program, python
from tests.faults.outcomes import Outcome as SeedOutcome
from tests.faults.quick import TTL_S
from tests.faults.redis_servers import Server

SETTING = "terminals"
GPUS = 2
CALLERS = 8
SECONDS = 20.0
"""How long faults go on in a course."""

HEAL_S = 60.0
"""Time after the last fault in which everything is free again."""

BEAT = Path(__file__).parents[1] / "e2e" / "dags" / "beat.py"
SHORT_ID = re.compile(rf"\S+@\S+ ([{ALPHABET}]{{4,5}})\b")
LEFT_TO_OTHERS = re.compile("may still run|could not be given back")

SERVER = """
[[servers]]
name = "{machine.name}"
gpus = {gpus}
cpus = 8
address = "{machine.address}"
"""


class Course:
    """One seed: a store, some machines, people in terminals, and what hurts them."""

    def __init__(self, seed: int, folder: Path, machines: Machines, bug: str = "") -> None:
        self.rng = random.Random(seed)
        self.outcome = SeedOutcome(seed, SETTING)
        self._folder, self._machines = folder, machines
        self._bug = bug
        self._store = Server(folder / "redis", "appendonly yes")
        self._ledger = folder / "beats"
        self._inventory = folder / "servers.toml"
        rows = (SERVER.format(machine=machine, gpus=GPUS) for machine in machines.servers)
        self._inventory.write_text("".join(rows))
        machines.ssh_program(folder / "bin")
        self._url = f"unix://{self._store.socket}?namespace=n"
        self._manager = GPUResourceManager.from_url(
            self._url, inventory=self._inventory, confirmation_window_s=1.0, lock_timeout_s=5.0
        )
        self._callers: list[Program] = []
        self._others: list[Program] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._ended_by_others: set[str] = set()
        self._store_sleeps = False

    # ---- the course ----

    def run(self) -> SeedOutcome:
        """Hurt everything for `SECONDS`, heal it, and check what was seen."""
        ends_at = time.monotonic() + SECONDS
        due = {self._call: 0.0, self._ask: 2.0, self._hurt: 1.5}
        begun_at = time.monotonic()
        while (now := time.monotonic()) < ends_at:
            for act, at in list(due.items()):
                if now - begun_at >= at:
                    act()
                    pause_s = {self._call: 0.2, self._ask: 1.5, self._hurt: 1.2}[act]
                    due[act] = now - begun_at + self.rng.uniform(0.3, 1.7) * pause_s
            self._undo_due(now)
            time.sleep(0.05)
        self._heal()
        self._check()
        return self.outcome

    def close(self) -> None:
        for program in (*self._callers, *self._others):
            program.close()
        for process in self._jobs():
            process.kill()
        self._manager.close()
        self._store.kill()
        for machine in self._machines.servers:
            machine.join()
            if not machine.alive:
                machine.start()

    def _call(self) -> None:
        """Let as many people as there are have a command that runs."""
        if sum(caller.exit_code is None for caller in self._callers) >= CALLERS:
            return
        seconds, gpus = self.rng.uniform(2.0, 8.0), self.rng.randint(1, GPUS)
        job = ["/usr/bin/python3", str(BEAT), str(self._ledger), f"{seconds:.1f}", "0"]
        self._callers.append(self._spawn("run", "--gpus", str(gpus), "--", *job))
        self.outcome.kinds["run"] += 1

    def _ask(self) -> None:
        """Let somebody stop or release a lease that they see, from a place of their own.

        Not while the store sleeps: the course wakes it between two steps, and this one would wait for it.
        """
        if self._store_sleeps:
            return
        words = self.rng.choice((["stop"], ["stop"], ["release"], ["release", "--force"]))
        with suppress(ResourceManagerError):
            if leases := self._manager.leases():
                lease = self.rng.choice(leases)
                self._ended_by_others.add(lease["short_id"])
                self._others.append(self._spawn(words[0], lease["task_id"], *words[1:], elsewhere=True))
                self.outcome.kinds[" ".join(words)] += 1

    def _spawn(self, *words: str, elsewhere: bool = False) -> Program:
        number = len(self._callers) + len(self._others)
        home = self._folder / (f"home-{number}" if elsewhere else "home")
        home.mkdir(exist_ok=True)
        environment = {
            "HOME": str(home),
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "GPU_MANAGER_STORE": self._url,
            "GPU_MANAGER_JOBS_DIR": str(home / "jobs"),
            "GPU_MANAGER_LOCK_TIMEOUT_S": "5",
            **({"PLANTED_BUG": self._bug} if self._bug else {}),
        }
        return Program(
            python("-m", "tests.faults.quick", *words), environment, self._folder / f"said-{number}"
        )

    # ---- what hurts ----

    def _hurt(self) -> None:
        fault = self.rng.choice(
            (
                self._kill_caller,
                self._stop_caller,
                self._kill_job,
                self._cut_server,
                self._kill_server,
                self._stop_store,
                self._restart_store,
            )
        )
        if fault():
            self.outcome.faults[fault.__name__.strip("_").replace("_", " ")] += 1

    def _after(self, delay_s: float, undo: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + delay_s, undo))

    def _undo_due(self, now: float) -> None:
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()

    def _some_caller(self) -> Program | None:
        alive = [caller for caller in self._callers if caller.exit_code is None]
        return self.rng.choice(alive) if alive else None

    def _kill_caller(self) -> bool:
        if (caller := self._some_caller()) is not None:
            caller.signal(signal.SIGKILL)
        return caller is not None

    def _stop_caller(self) -> bool:
        if (caller := self._some_caller()) is not None:
            caller.signal(signal.SIGSTOP)
            self._after(self.rng.uniform(0.2, 1.8) * TTL_S, lambda: caller.signal(signal.SIGCONT))
        return caller is not None

    def _kill_job(self) -> bool:
        jobs = self._jobs()
        if jobs:
            with suppress(psutil.Error):
                self.rng.choice(jobs).kill()
        return bool(jobs)

    def _some_server(self) -> Machine | None:
        alive = [machine for machine in self._machines.servers if machine.alive]
        return self.rng.choice(alive) if len(alive) > 1 else None

    def _cut_server(self) -> bool:
        if (machine := self._some_server()) is not None:
            machine.cut()
            self._after(self.rng.uniform(0.2, 1.8) * TTL_S, machine.join)
        return machine is not None

    def _kill_server(self) -> bool:
        if (machine := self._some_server()) is not None:
            machine.die()
            self._after(self.rng.uniform(0.5, 8.0), lambda: None if machine.alive else machine.boot())
        return machine is not None

    def _stop_store(self) -> bool:
        self._store.process.send_signal(signal.SIGSTOP)
        self._store_sleeps = True
        self._after(self.rng.uniform(0.1, 2.0), self._wake_store)
        return True

    def _wake_store(self) -> None:
        self._store.process.send_signal(signal.SIGCONT)
        self._store_sleeps = False

    def _restart_store(self) -> bool:
        self._store.kill()
        self._store.start()
        self._store_sleeps = False
        return True

    def _jobs(self) -> list[psutil.Process]:
        """Return the live processes of the course's jobs, on whatever machine."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self._ledger) in process.cmdline()[:3] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # ---- the end ----

    def _heal(self) -> None:
        """Undo every fault, wait for the callers, and let an operator stop what they have lost."""
        while self._later:
            self._undo_due(float("inf"))
        ends_at = time.monotonic() + HEAL_S
        for caller in (*self._callers, *self._others):
            while caller.exit_code is None and time.monotonic() < ends_at:
                time.sleep(0.05)
            if caller.exit_code is None:
                self._complain(f"a command did not end within {HEAL_S:g} s: {caller.said()[-300:]}")
        while (leases := self._leases()) and time.monotonic() < ends_at + HEAL_S:
            for lease in leases:
                if lease["state"] == "ERROR":
                    self._spawn_and_wait("stop", lease["task_id"])
            time.sleep(0.2)
        self.outcome.complaints += [
            f"{lease['task_id']} is left: {lease['state']} {lease['reason']}" for lease in self._leases()
        ]

    def _leases(self) -> list[Any]:
        self._manager.expire_and_schedule()
        for entry in self._manager.queue():  # of callers that were killed while they waited
            self._manager.cancel(entry["task_id"])
        return list(self._manager.leases())

    def _spawn_and_wait(self, *words: str) -> None:
        program = self._spawn(*words)
        self._others.append(program)
        program.wait(HEAL_S)

    def _complain(self, text: str) -> None:
        self.outcome.complaints.append(text)

    def _check(self) -> None:
        changes = [change for _, change in self._manager.store.history(0, 1_000_000)]
        beats = []
        if self._ledger.exists():
            beats = [json.loads(line) for line in self._ledger.read_text().splitlines()]
        self.outcome.complaints += check_ledger(beats, changes)
        succeeded = [caller.said() for caller in self._callers if caller.exit_code == 0]
        alone = [said for said in succeeded if self._ended_by_others.isdisjoint(SHORT_ID.findall(said))]
        self.outcome.complaints += check_successes(alone, changes)
        self.outcome.operations = self.outcome.kinds.total()
        self.outcome.granted = sum(isinstance(change, Granted) for change in changes)
        if self._jobs():
            self._complain("a job still runs when all is free")


def check_ledger(beats: Sequence[dict[str, Any]], changes: Iterable[Change]) -> list[str]:
    """Return where a process ran on GPUs that were another lease's already, or that no lease ever had."""
    grants: dict[tuple[str, int], list[tuple[float, int]]] = {}
    tokens: dict[int, set[tuple[str, int]]] = {}
    for change in changes:
        if isinstance(change, Granted):
            for member in change.lease.members:
                for gpu_id in member.gpu_ids:
                    place = member.node, gpu_id
                    grants.setdefault(place, []).append((change.at, change.lease.fencing_token))
                    tokens.setdefault(change.lease.fencing_token, set()).add(place)
    found: Counter[str] = Counter()
    for beat in beats:
        token = int(beat["process"].split("-")[0])
        for gpu_id in map(int, beat["gpus"].split(",")):
            place = beat["server"], gpu_id
            where = f"GPU {gpu_id} of {beat['server']}"
            if place not in tokens.get(token, ()):
                found[f"a process of lease {token} ran on {where}, which it never had"] += 1
            for at, other in grants.get(place, ()):
                if other > token and at <= beat["at"]:
                    found[f"a process of lease {token} still ran on {where} when lease {other} had it"] += 1
    return list(found)


def check_successes(said: Iterable[str], changes: Sequence[Change]) -> list[str]:
    """Return the commands that ended well, and said no more, without a lease that ended so.

    One whose server or store did not answer at its end says that others have to end its lease.
    """
    short_ids = {c.lease.lease_id: short_id(c.lease.sequence) for c in changes if isinstance(c, Granted)}
    well = {
        short_ids[c.lease_id] for c in changes if isinstance(c, Released) and c.outcome == Outcome.SUCCESS
    }
    asked = (SHORT_ID.findall(text) for text in said if not LEFT_TO_OTHERS.search(text))
    return [f"{ids[0]} ended well, and its lease did not" for ids in asked if ids and not well & set(ids)]


fleet: list[Machines] = []
"""The machines that all courses of a process share, once it has them."""


def run_course(seed: int, folder: Path, *, bug: str = "") -> SeedOutcome:
    """Return the outcome of a seed on the machines of `fleet`."""
    if bug:
        BUGS[bug]()
    course = Course(seed, folder, fleet[-1], bug)
    try:
        return course.run()
    finally:
        course.close()
