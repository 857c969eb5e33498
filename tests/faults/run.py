"""Runs seeded schedules of faults against real processes and real servers, and checks what happened.

`python -m tests.faults.run --seeds 200` runs seeds 0 to 199, `--seed 17` replays one, with its schedule;
`--store postgresql`, `mariadb`, `mysql` or `sqlite` hurts a database,
`--store variables` the Variable store on an Airflow on PostgreSQL, with `--tasks` through tasks of that
Airflow, `--network netns` goes over network namespaces, `--other-version CHECKOUT` runs every other worker on
the package there.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from resource_manager.core.changes import Change, Granted, MembersReleased, Preempting, Released
from resource_manager.core.changes import Outcome as LeaseOutcome
from resource_manager.storage.codec import change_to_dict
from tests.builders import redefine
from tests.faults import agents, airflow_on_postgres, gpus, machines, namespaces, terminals
from tests.faults.access_paths import ACCESS_PATHS
from tests.faults.agent_servers import AgentServer
from tests.faults.airflow_tasks import Airflow
from tests.faults.bugs import BUGS, OF_AGENTS, OF_PREEMPTION, OF_TERMINALS
from tests.faults.checker import SWEPT, Operation, check, check_older, read_records
from tests.faults.commit_points import POINTS
from tests.faults.older_build import older_build
from tests.faults.outcomes import Outcome, report, summarise
from tests.faults.processes import Process, of_other_version
from tests.faults.schedule import Schedule
from tests.faults.setups import (
    CLOCK,
    SETTINGS,
    Databases,
    Namespaces,
    OneRedis,
    OnMariaDB,
    OnMySQL,
    OnPostgreSQL,
    OnSQLite,
    Tasks,
    TwoFormats,
    Variables,
    remove,
    setting_of,
)
from tests.faults.worker import RULES, TTL_S, Assignment, inventory, main
from tests.shifted_clock import ShiftedClock
from tests.sql_servers import Postgres

HEAL_S = 30.0
"""Within the time to live and this, everything is free or held by a live owner once the faults are over."""

SQL_SETTINGS = (OnPostgreSQL.name, OnMariaDB.name, OnMySQL.name, OnSQLite.name)

FIRST_GRANTS = 10
"""That many leases are granted before the first fault."""

PREEMPTION_EVERY = 3
"""Every so many seeds the teams have rules with preemption."""

FLOODS_EVERY = 2
"""Every so many seeds the first worker floods the others' service or store."""

FINDING = {"no fencing": ("stop worker",)}
"""The faults that bring a planted bug to light, where not all do."""


class Run:
    """One seed: its servers, its workers, its faults."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        setting: str = "",
        workers: int = 8,
        seconds: float | None = None,
        bug: str = "",
        access_paths: tuple[str, ...] = tuple(ACCESS_PATHS),
        kinds: tuple[str, ...] = (),
        halting: float = 0.4,
        halts: tuple[str, ...] = ("killed", "stopped"),
        other_version: Path | None = None,
        preemption: bool = False,
        floods: bool = False,
        verbose: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.count = workers
        self.bug = bug
        self.access_paths = access_paths
        self.halting = halting
        self.halts = halts
        self.other_version = other_version
        setting = setting or _setting_of(seed, bug=bug, kinds=kinds, other_version=other_version)
        self.outcome = Outcome(seed, setting)
        self.preemption = preemption or (seed % PREEMPTION_EVERY == 1 and not bug and other_version is None)
        self.floods = floods or (seed % FLOODS_EVERY == 0 and not bug and other_version is None)
        self.records = folder / "records"
        self.halted = folder / "halts"
        self.stop_file = folder / "stop"
        for path in (self.records, self.halted):
            path.mkdir(parents=True)
        self.workers: dict[int, Process] = {}
        self.replaced: list[Process] = []
        self.rests: list[tuple[float, float]] = []
        self.due: dict[int, float] = {}
        self.incarnation = 0
        self.other_pids: set[int] = set()
        self.setup = SETTINGS[setting](folder, workers, self.rng)
        if self.setup.has_older_build:
            self.other_version = older_build(folder / "older")
        self.seconds = self.setup.seconds if seconds is None else seconds
        self.kinds = kinds or FINDING.get(bug, self.setup.kinds)
        self.schedule = Schedule(self, self.setup, self.rng, print if verbose else lambda line: None)

    # ---- the course of a run ----

    def run(self) -> Outcome:
        try:
            with self.setup.manager() as manager:  # it stores the cluster, which services only read
                if self.preemption and not self.setup.may_lose:
                    redefine(manager, teams=RULES)
            for slot in range(self.count):
                self.spawn(slot)
            self.wait_for_work()
            self.schedule.run(self.kinds, self.setup.once, self.seconds)
            self.heal()
            self.finish()
        finally:
            self.stop_file.touch()
            for process in [*self.workers.values(), *self.replaced]:
                process.kill()
            self.setup.stop()
        return self.outcome

    def spawn(self, slot: int) -> None:
        self.incarnation += 1
        assignment = Assignment(
            slot=slot,
            seed=self.rng.randrange(2**32),
            record=str(self.records / f"{slot}-{self.incarnation}.jsonl"),
            stop=str(self.stop_file),
            halts=str(self.halted),
            access_path=self.rng.choice(self.access_paths),
            bug=self.bug,
            halts_at=self.commit_point(),
            preemption=self.preemption,
            keeps=self.setup.has_older_build and slot % 2 == 1,
            floods=self.floods and slot == 0,
            **self.setup.assignment(slot),
        )
        if self.other_version is not None and slot % 2 and not assignment.services:
            other = of_other_version(assignment, self.other_version, self.records / "errors")
            self.other_pids.add(other.pid)
            self.workers[slot] = other
        else:
            self.workers[slot] = self.setup.start(assignment)

    def commit_point(self) -> tuple[str, int, float] | None:
        """Draw where a process dies or sleeps, if it does: the point, the number of the commit, how long."""
        halts, point = self.rng.random(), self.rng.choice(POINTS[self.setup.store_kind])
        number = self.rng.randint(3, 25)
        sleep_s = self.rng.uniform(0.05, self.setup.longest_sleep_s)
        dies = self.rng.choice(self.halts) == "killed"
        if self.bug or halts >= self.halting or (dies and not self.setup.starts_afresh):
            return None
        return point, number, 0.0 if dies else sleep_s

    def replace(self, slot: int) -> None:
        self.due.pop(slot, None)  # it may have died before
        self.replaced.append(self.workers[slot])
        self.spawn(slot)

    def upgrade(self) -> None:
        """Replace the workers of the older build by some of this one."""
        self.other_version = None
        for slot, process in list(self.workers.items()):
            if slot % 2:
                process.kill()
                self.replace(slot)

    def tend(self) -> None:
        """Restart the workers that died, a little later; a worker that ended with an error is a complaint."""
        now = time.monotonic()
        for slot, process in list(self.workers.items()):
            if process.exitcode() is not None and slot not in self.due:
                self.due[slot] = now + self.rng.uniform(0.0, 1.0)
        for slot, moment in list(self.due.items()):
            if moment <= now:
                del self.due[slot]
                self.note_end(self.workers[slot])
                self.spawn(slot)
        for service in self.setup.services:
            if service.process.exitcode() is not None:
                service.start(self.commit_point())

    def note_end(self, process: Process) -> None:
        code = process.exitcode()
        if code not in {0, -9}:
            self.outcome.complaints.append(f"a worker ended with {code}")

    def wait_for_work(self) -> None:
        """Until every worker has begun and leases are granted, unless a bug may keep them from that.

        Faults that hit nobody prove nothing. A jump of the clock and a restart of Redis, if they come first,
        may suspend grants until the end.
        """
        deadline = time.monotonic() + 120
        while not self._is_busy():
            if time.monotonic() > deadline:
                raise RuntimeError("the workers did not begin within 120 s")
            self.tend()
            time.sleep(0.05)

    def _is_busy(self) -> bool:
        records = list(self.records.glob("*.jsonl"))
        grants = sum(path.read_text().count('"granted"') for path in records)
        is_granting = bool(self.bug) or grants >= FIRST_GRANTS
        return is_granting and len({path.name.partition("-")[0] for path in records}) == self.count

    def heal(self) -> None:
        self.schedule.heal()
        self.stop_file.touch()
        for process in [*self.workers.values(), *self.replaced]:
            if process.wait(self.setup.patience_s) is None:
                self.outcome.complaints.append(
                    f"a worker did not end within {self.setup.patience_s:g} s of the last fault"
                )
            else:
                self.note_end(process)
        for service in self.setup.services:  # what it was asked before it was stopped must not come later
            service.process.kill()

    def finish(self) -> None:
        """Everything must be free again; then all that was written down is checked."""
        with self.setup.manager() as manager:
            begin = time.monotonic()
            while (manager.leases() or manager.queue()) and time.monotonic() - begin < TTL_S + HEAL_S:
                time.sleep(0.1)
                manager.expire_and_schedule()
                for entry in manager.queue():  # of workers who died, and have no successor any more
                    manager.cancel(entry["task_id"])
                for lease in manager.leases():
                    # A remainder, or by a jump back of the clock an hour from its end: its owner died.
                    if lease["quarantined"] or (lease["expires_at"] or 0) > manager.store.now() + HEAL_S:
                        token = lease["fencing_token"]
                        manager.release(lease["task_id"], fencing_token=token, outcome=SWEPT)
            summary = manager.get_resource_summary()["servers"]
            if any(server["available_gpus"] != 8 for server in summary):
                self.outcome.complaints.append(f"not all is free after {TTL_S + HEAL_S:g} s: {summary}")
            history = self.setup.history(manager)
        lines = [json.dumps([version, change_to_dict(change)]) for version, change in history]
        (self.records / "history").write_text("\n".join(lines))
        operations = read_records(self.records)
        self.count_up(operations, [change for _, change in history])
        self.outcome.complaints += check(
            inventory(),
            operations,
            history,
            wall_minus_monotonic_s=time.time() - time.monotonic(),
            rests=self.rests,
            jumps=self.schedule.jumps,
            may_lose=self.setup.may_lose,
        )

    def count_up(self, operations: list[Operation], history: list[Change]) -> None:
        outcome = self.outcome
        outcome.faults = self.schedule.done
        for path in self.halted.iterdir():
            outcome.faults[path.suffix[1:]] += 1
        tokens = {change.lease.fencing_token for change in history if isinstance(change, Granted)}
        outcome.operations = len(operations)
        outcome.kinds = Counter(operation.kind for operation in operations)
        outcome.gangs = len(
            {
                operation.answer["fencing_token"]
                for operation in operations
                if operation.result == "granted" and len(operation.answer["members"]) > 1
            }
        )
        outcome.preemptions = sum(
            isinstance(change, Preempting) and change.preemptor != "" for change in history
        )
        outcome.victims = sum(
            isinstance(change, Released) and change.outcome == LeaseOutcome.PREEMPTED for change in history
        )
        outcome.members_released = sum(isinstance(change, MembersReleased) for change in history)
        outcome.errors = sum("error" in operation.answer for operation in operations)
        outcome.cancelled = sum("cancelled" in operation.answer for operation in operations)
        granted = {
            operation.answer["fencing_token"] for operation in operations if operation.result == "granted"
        }
        outcome.granted = len(granted)
        outcome.lost_leases = len(granted - tokens)
        of_older = [
            operation
            for operation in operations
            if operation.pid in self.other_pids and operation.begin > self.schedule.outdated_since
        ]
        outcome.kept_by_older = sum(operation.result in {"renewed", "released"} for operation in of_older)
        outcome.complaints += check_older(of_older)
        if not outcome.operations:
            outcome.complaints.append("no operation was carried out, which proves nothing")


def _setting_of(seed: int, **options: object) -> str:
    """Return the setting where none is named; beside another version none in which none or another is."""
    if options.get("bug") or options.get("kinds"):
        return "one server"
    setting = setting_of(seed)
    alone = (gpus.SETTING, TwoFormats.name)
    return "one server" if setting in alone and options.get("other_version") else setting


def run_seed(seed: int, *, keep: bool = False, **options: object) -> Outcome:
    """Runs one seed in a folder of its own; options as of `Run`. Kept on demand, or if broken with no bug."""
    preload = [main.__module__, AgentServer.__module__]
    if issubclass(SETTINGS.get(str(options.get("setting")), OneRedis), Variables):
        preload += airflow_on_postgres.PRELOAD
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{seed}-"))
    try:
        if (options.get("setting") or _setting_of(seed, **options)) == gpus.SETTING:
            outcome = gpus.run_course(seed, folder)
        elif options.get("setting") == agents.SETTING:
            outcome = agents.run_course(seed, folder, bug=str(options.get("bug", "")))
        elif options.get("setting") == terminals.SETTING:
            outcome = terminals.run_course(seed, folder, bug=str(options.get("bug", "")))
        else:
            outcome = Run(seed, folder, **options).run()  # type: ignore[arg-type]
        keep = keep or bool(outcome.complaints and not options.get("bug"))
        return outcome
    finally:
        print(f"  records are in {folder}") if keep else remove(folder)


@contextmanager
def servers_of(setting: str) -> Iterator[None]:
    """Yield the resources that all runs of a setting share; end the program in one line without them."""
    missing = {
        **{name: airflow_on_postgres for name, each in SETTINGS.items() if issubclass(each, Variables)},
        Namespaces.name: namespaces,
        terminals.SETTING: machines,
    }
    if setting in missing and (reason := missing[setting].what_is_missing()):
        raise SystemExit(f"--store and --network: {setting} {reason}")
    if setting == terminals.SETTING:
        with tempfile.TemporaryDirectory() as home, closing(machines.Machines(Path(home), 3)) as made:
            terminals.fleet.append(made)
            yield
        return
    if issubclass(kind := SETTINGS.get(setting, OneRedis), Databases):
        if reason := kind.server_class.missing():
            raise SystemExit(f"--store {setting} {reason}")
        clock = ShiftedClock() if CLOCK else None
        kind.database = kind.server_class(clock=clock)
        try:
            yield
        finally:
            kind.database.stop()
            if clock is not None:
                clock.close()
        return
    if not issubclass(kind, Variables):
        yield
        return
    Variables.postgres = Postgres()
    try:
        with ExitStack() as stack:
            airflow_home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            environment = airflow_on_postgres.airflow_on(Variables.postgres, airflow_home)
            os.environ.update(environment)
            if setting == Tasks.name:
                Tasks.airflow = stack.enter_context(Airflow(airflow_home, environment))
            yield
    finally:
        Variables.postgres.stop()


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay only this seed, and keep its records")
    parser.add_argument(
        "--workers", type=int, default=8, help="processes that compete in a run; one has no rival"
    )
    parser.add_argument(
        "--seconds", type=float, help="how long faults go on in each run (5, with --tasks 30)"
    )
    parser.add_argument("--bug", default="", choices=["", *BUGS], help="a bug to plant")
    parser.add_argument("--store", default="redis", choices=["redis", "variables", *SQL_SETTINGS])
    parser.add_argument("--preemption", action="store_true", help="in all seeds, not in every third")
    parser.add_argument("--floods", action="store_true", help="in all seeds, not in every second")
    parser.add_argument("--tasks", action="store_true", help="reach the Variable from tasks of Airflow")
    parser.add_argument("--network", default="proxy", choices=["proxy", "netns"])
    settings = ["", *SETTINGS, gpus.SETTING, agents.SETTING, terminals.SETTING]
    parser.add_argument("--setting", default="", choices=settings, help="the same one for all seeds")
    parser.add_argument("--other-version", type=Path, help="a checkout whose package every other worker runs")
    options = parser.parse_args(arguments)
    setting = options.setting
    if options.tasks and options.store != "variables":
        parser.error("--tasks: goes with --store variables")
    if options.store == "variables":
        setting = Tasks.name if options.tasks else Variables.name
    elif options.store in SQL_SETTINGS:
        setting = options.store
    elif options.network == "netns":
        setting = Namespaces.name
    elif options.bug in OF_AGENTS:
        setting = agents.SETTING
    elif options.bug in OF_TERMINALS and not setting:
        setting = terminals.SETTING
    one = options.seed is not None
    seeds = [options.seed] if one else range(options.first, options.first + options.seeds)
    outcomes: list[Outcome] = []
    logging.disable(logging.CRITICAL)  # what is hurt complains
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the servers of a run would outlive it
    # Interrupted, it sums up the seeds that are through.
    with servers_of(setting), suppress(KeyboardInterrupt):
        for seed in seeds:
            outcome = run_seed(
                seed,
                setting=setting,
                workers=options.workers,
                seconds=options.seconds,
                bug=options.bug,
                preemption=options.preemption or options.bug in OF_PREEMPTION,
                floods=options.floods,
                other_version=options.other_version and options.other_version.resolve(),
                verbose=one,
                keep=one,
            )
            outcomes.append(outcome)
            report(outcome)
    return summarise(outcomes)


if __name__ == "__main__":
    sys.exit(command())
