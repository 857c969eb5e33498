"""Runs seeded schedules of faults against real processes and a real Redis, and checks what happened.

`python -m tests.faults.run --seeds 200` runs seeds 0 to 199; `--seed 17` replays one, with its schedule.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from resource_manager.inventory import default_inventory
from resource_manager.manager import GPUResourceManager
from resource_manager.models import Change, Granted
from resource_manager.stores import RedisStore
from tests.faults.checker import Operation, check, read_records
from tests.faults.proxy import Proxy
from tests.faults.servers import SentinelGroup, Server
from tests.faults.worker import BUGS, SERVERS, TTL_S, Assignment, main

HEAL_S = 30.0
"""Within the time to live and this, everything is free or held by a live owner once the faults are over."""

ONE_SERVER = (
    "kill worker",
    "kill worker",
    "stop worker",
    "stop worker",
    "lose answers",
    "lose answers",
    "cut",
    "partition",
    "delay",
    "restart redis",
    "fill memory",
    "read only",
    "flush scripts",
    "stop redis",
)
FINDING = {"no fencing": ("stop worker",)}
"""The faults that bring a planted bug to light, where not all do."""

FAILING_OVER = ("kill worker", "stop worker", "fail over")


@dataclass
class Outcome:
    seed: int
    setting: str
    faults: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    granted: int = 0
    errors: int = 0
    lost_leases: int = 0
    complaints: list[str] = field(default_factory=list)


class Run:
    """One seed: its servers, its workers, its faults."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        workers: int,
        seconds: float,
        bug: str = "",
        kinds: tuple[str, ...] = (),
        verbose: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.folder = folder
        self.count = workers
        self.seconds = seconds
        self.bug = bug
        self.kinds = kinds
        self.verbose = verbose
        self.failing_over = seed % 5 == 4 and not bug and not kinds
        self.outcome = Outcome(seed, "sentinel" if self.failing_over else "one server")
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        self.stop_file = folder / "stop"
        self.workers: dict[int, BaseProcess] = {}
        self.replaced: list[BaseProcess] = []
        self.stopped: list[tuple[float, int]] = []
        self.rests: list[tuple[float, float]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.incarnation = 0
        if self.failing_over:
            self.group = SentinelGroup(folder / "servers")
            self.group.wait_until_joined()
            self.server = self.group.primary
        else:
            self.server = Server(folder / "server", 'save ""', "appendonly yes", "appendfsync always")
            self.proxies = [Proxy(str(self.server.socket)) for _ in range(workers)]

    # ---- the course of a run ----

    def run(self) -> Outcome:
        try:
            for slot in range(self.count):
                self.spawn(slot)
            self.wait_for_work()
            self.hurt()
            self.heal()
            self.finish()
        finally:
            for process in self.processes():
                process.kill()
                process.join()
            if self.failing_over:
                self.group.stop()
            else:
                self.server.kill()
                for proxy in self.proxies:
                    proxy.close()
        return self.outcome

    def spawn(self, slot: int) -> None:
        self.incarnation += 1
        assignment = Assignment(
            slot=slot,
            seed=self.rng.randrange(2**32),
            url=self.group.url() if self.failing_over else self.proxies[slot].url("faults"),
            record=self.records / f"{slot}-{self.incarnation}.jsonl",
            stop=self.stop_file,
            bug=self.bug,
        )
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=main, args=(assignment,), daemon=True)
        process.start()
        self.workers[slot] = process

    def wait_for_work(self) -> None:
        """Until every worker has begun: faults that hit nobody prove nothing."""
        deadline = time.monotonic() + 60
        while len(list(self.records.glob("*.jsonl"))) < self.count:
            if time.monotonic() > deadline:
                raise RuntimeError("the workers did not begin within 60 s")
            time.sleep(0.05)

    def processes(self) -> list[BaseProcess]:
        return [*self.workers.values(), *self.replaced]

    def hurt(self) -> None:
        begin = time.monotonic()
        kinds = self.kinds or (FAILING_OVER if self.failing_over else FINDING.get(self.bug, ONE_SERVER))
        at = 0.6
        schedule: list[tuple[float, str]] = []
        while at < self.seconds - 0.5:
            schedule.append((at, self.rng.choice(kinds)))
            at += self.rng.uniform(0.1, 0.8)
        if self.failing_over:
            schedule = [(at, kind) for at, kind in schedule if kind != "fail over"]
            schedule.append((self.rng.uniform(1.5, 2.5), "fail over"))
        for at, kind in sorted(schedule):
            self.wait_until(begin + at)
            self.outcome.faults[kind] += 1
            if self.verbose:
                print(f"  {at:5.2f} s  {kind}", flush=True)
            getattr(self, "do_" + kind.replace(" ", "_"))()
        self.wait_until(begin + self.seconds)

    def wait_until(self, moment: float) -> None:
        """Sleeps, doing what is due on the way."""
        while True:
            due = [item for item in self.later if item[0] <= time.monotonic()]
            for item in due:
                self.later.remove(item)
                item[1]()
            if time.monotonic() >= moment:
                return
            time.sleep(0.01)

    def after(self, delay_s: float, step: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + delay_s, step))

    def heal(self) -> None:
        while self.later:
            self.wait_until(min(at for at, _ in self.later))
        self.stop_file.touch()
        for process in self.processes():
            process.join(25)
            if process.exitcode != 0:
                self.outcome.complaints.append(f"a worker ended with {process.exitcode} after the faults")

    def finish(self) -> None:
        """Everything must be free again; then all that was written down is checked."""
        url = self.group.url() if self.failing_over else f"unix://{self.server.socket}?namespace=faults"
        servers = default_inventory(SERVERS)
        with GPUResourceManager.from_url(url, inventory=servers, reconfirm_s=TTL_S) as manager:
            begin = time.monotonic()
            while manager.leases() and time.monotonic() - begin < TTL_S + HEAL_S:
                time.sleep(0.1)
                manager.sweep()
            summary = manager.get_resource_summary()["servers"]
            if any(server["available_gpus"] != 8 for server in summary):
                self.outcome.complaints.append(f"not all is free after {TTL_S + HEAL_S:g} s: {summary}")
            store = manager._state.store
            assert isinstance(store, RedisStore)
            history: list[tuple[int, Change]] = []
            while batch := store.history(after=history[-1][0] if history else 0, limit=10_000):
                history += batch
        operations = read_records(self.records)
        self.count_up(operations, [change for _, change in history])
        self.outcome.complaints += check(
            servers,
            operations,
            history,
            wall_minus_monotonic_s=time.time() - time.monotonic(),
            rests=self.rests,
            may_lose=self.failing_over,
        )

    def count_up(self, operations: list[Operation], history: list[Change]) -> None:
        tokens = {change.lease.fencing_token for change in history if isinstance(change, Granted)}
        self.outcome.operations = len(operations)
        self.outcome.errors = sum("error" in operation.answer for operation in operations)
        granted = {
            operation.answer["fencing_token"] for operation in operations if operation.result == "granted"
        }
        self.outcome.granted = len(granted)
        self.outcome.lost_leases = len(granted - tokens)

    # ---- faults ----

    def some_slot(self) -> int:
        alive = [slot for slot, process in sorted(self.workers.items()) if process.is_alive()]
        return self.rng.choice(alive or sorted(self.workers))

    def do_kill_worker(self) -> None:
        slot = self.some_slot()
        if not self.workers[slot].is_alive():
            return
        self.workers[slot].kill()
        self.workers[slot].join()
        self.after(self.rng.uniform(0.0, 1.0), lambda: self.spawn(slot))

    def do_stop_worker(self) -> None:
        """A worker sleeps; now and then it is taken for dead and another does its tasks when it wakes."""
        slot = self.some_slot()
        process = self.workers[slot]
        assert process.pid is not None
        pid = process.pid
        signalled(pid, signal.SIGSTOP)
        if self.rng.random() < 0.5 and process.is_alive():
            self.replaced.append(process)
            self.spawn(slot)
        self.after(self.rng.uniform(0.05, 1.8 * TTL_S), lambda: signalled(pid, signal.SIGCONT))

    def do_lose_answers(self) -> None:
        self.proxies[self.some_slot()].lose_answers += self.rng.randint(1, 4)

    def do_cut(self) -> None:
        self.proxies[self.some_slot()].cut()

    def do_partition(self) -> None:
        some = self.rng.sample(self.proxies, self.rng.randint(1, len(self.proxies)))
        self.for_a_while(some, "partitioned", True, False, self.rng.uniform(0.1, 1.5 * TTL_S))

    def do_delay(self) -> None:
        some = self.rng.sample(self.proxies, self.rng.randint(1, len(self.proxies)))
        self.for_a_while(some, "delay_s", self.rng.uniform(0.001, 0.1), 0.0, self.rng.uniform(0.2, 1.0))

    def for_a_while(self, targets: list[Proxy], name: str, value: Any, before: Any, seconds: float) -> None:
        for target in targets:
            setattr(target, name, value)

        def undo() -> None:
            for target in targets:
                setattr(target, name, before)

        self.after(seconds, undo)

    def do_restart_redis(self) -> None:
        self.server.kill()
        time.sleep(self.rng.uniform(0.0, 0.3))
        self.server.start()
        self.rest()

    def do_stop_redis(self) -> None:
        pid = self.server.process.pid
        signalled(pid, signal.SIGSTOP)
        self.after(self.rng.uniform(0.05, 1.0), lambda: signalled(pid, signal.SIGCONT))

    def do_fill_memory(self) -> None:
        self.configure("maxmemory", "1")
        self.after(self.rng.uniform(0.1, 1.0), lambda: self.configure("maxmemory", "0"))

    def do_read_only(self) -> None:
        self.command("REPLICAOF", "127.0.0.1", "1")
        self.after(self.rng.uniform(0.1, 0.6), lambda: self.command("REPLICAOF", "NO", "ONE"))

    def do_flush_scripts(self) -> None:
        self.command("SCRIPT", "FLUSH")

    def do_fail_over(self) -> None:
        """The replica falls behind, then the primary dies: the last commits are lost."""
        replica = self.group.replica.process.pid
        signalled(replica, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.0, 0.2))
        self.group.primary.kill()
        signalled(replica, signal.SIGCONT)
        self.rest()

    def rest(self) -> None:
        now = time.monotonic()
        self.rests.append((now - 1.0, now + TTL_S + 8.0))

    def configure(self, name: str, value: str) -> None:
        self.command("CONFIG", "SET", name, value)

    def command(self, *words: str) -> None:
        signalled(self.server.process.pid, signal.SIGCONT)
        with self.server.client() as client:
            client.execute_command(*words)


def signalled(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def run_seed(
    seed: int,
    *,
    workers: int = 8,
    seconds: float = 5.0,
    bug: str = "",
    kinds: tuple[str, ...] = (),
    verbose: bool = False,
    keep: bool = False,
) -> Outcome:
    """Runs one seed in a folder of its own and removes it, unless it is to be kept.

    `kinds` are the faults to choose from, by default all that the seed's servers allow.
    """
    logging.disable(logging.CRITICAL)
    multiprocessing.get_context("forkserver").set_forkserver_preload([main.__module__])
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{seed}-"))
    try:
        run = Run(seed, folder, workers=workers, seconds=seconds, bug=bug, kinds=kinds, verbose=verbose)
        return run.run()
    finally:
        if keep:
            print(f"  records are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay only this seed, and keep its records")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long faults go on in each run")
    parser.add_argument("--bug", default="", choices=["", *BUGS], help="a bug to plant")
    options = parser.parse_args()
    seeds = (
        [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    )
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    bad = 0
    for seed in seeds:
        outcome = run_seed(
            seed,
            workers=options.workers,
            seconds=options.seconds,
            bug=options.bug,
            verbose=options.seed is not None,
            keep=options.seed is not None,
        )
        bad += bool(outcome.complaints)
        faults += outcome.faults
        total += Counter(
            operations=outcome.operations,
            grants=outcome.granted,
            errors=outcome.errors,
            lost_by_redis=outcome.lost_leases if outcome.setting == "sentinel" else 0,
        )
        verdict = "ok" if not outcome.complaints else f"BROKEN: {outcome.complaints[0]}"
        print(
            f"seed {seed:4d}  {outcome.setting:10s}  {outcome.operations:5d} operations  "
            f"{outcome.granted:4d} grants  {outcome.errors:4d} errors  "
            f"{sum(outcome.faults.values()):2d} faults  {verdict}",
            flush=True,
        )
        for complaint in outcome.complaints[1:6]:
            print(f"           {complaint}")
    print(json.dumps({"seeds": len(seeds), "broken": bad, **total, "faults": dict(faults)}, indent=2))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(command())
