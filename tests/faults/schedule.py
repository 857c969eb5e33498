"""The faults, and when each is done and undone."""

from __future__ import annotations

import math
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol, cast

from resource_manager.errors import LockTimeoutError, StoreUnavailableError
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.faults.airflow_tasks import AirflowTask
from tests.faults.processes import Process, signalled
from tests.faults.proxy import Proxy
from tests.faults.setups import Databases, Namespaces, OneRedis, OnSQLite, Sentinels, Tasks, Variables
from tests.faults.worker import TTL_S, inventory

SECONDS_BEFORE = 0.6


class Crew(Protocol):
    """The workers of a run, by slot."""

    workers: dict[int, Process]
    rests: list[tuple[float, float]]

    def spawn(self, slot: int) -> None:
        """Starts a worker in that slot."""

    def replace(self, slot: int) -> None:
        """Starts another beside the one in that slot, which is taken for dead."""

    def upgrade(self) -> None:
        """Replaces the workers of the older build by some of this one."""

    def tend(self) -> None:
        """Starts another for each that died on its own."""


class Schedule:
    """Does the faults of one run at their times, drawn from its seed."""

    def __init__(self, crew: Crew, setup: OneRedis, rng: random.Random, say: Callable[[str], None]) -> None:
        self.crew = crew
        self.setup = setup
        self.rng = rng
        self.say = say
        self.done: Counter[str] = Counter()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.jumps: list[tuple[float, int]] = []
        """Jumps of the store's clock: when, by the steady clock, and by how many seconds."""
        self.outdated_since = math.inf
        """When, by the steady clock, the store had a change that the older build does not know."""

    def run(self, kinds: tuple[str, ...], once: str, seconds: float) -> None:
        begin = time.monotonic()
        at = SECONDS_BEFORE
        times: list[tuple[float, str]] = []
        while at < seconds - 0.5:
            times.append((at, self.rng.choice(kinds)))
            at += self.rng.uniform(*self.setup.pauses_s)
        if once:
            times.append((self.rng.uniform(0.3, 0.5) * seconds, once))
        for at, kind in sorted(times):
            self.wait_until(begin + at)
            self.done[kind] += 1
            self.say(f"  {at:5.2f} s  {kind}")
            getattr(self, "do_" + kind.replace(" ", "_"))()
        self.wait_until(begin + seconds)

    def heal(self) -> None:
        """Waits until every fault is undone."""
        while self.later:
            self.wait_until(min(at for at, _ in self.later))

    def wait_until(self, moment: float) -> None:
        """Sleeps, doing what is due on the way."""
        while True:
            while due := [item for item in self.later if item[0] <= time.monotonic()]:
                self.later.remove(due[0])
                due[0][1]()  # it may wait, and do others of them
            self.crew.tend()
            if time.monotonic() >= moment:
                return
            time.sleep(0.01)

    def after(self, delay_s: float, step: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + delay_s, step))

    def rest(self) -> None:
        """From now on, until leases are confirmed, nothing needs to be granted."""
        now = time.monotonic()
        self.crew.rests.append((now - 1.0, now + TTL_S + 8.0))

    # ---- processes ----

    def some_slot(self) -> int:
        workers = self.crew.workers
        alive = [slot for slot, process in sorted(workers.items()) if process.runs()]
        return self.rng.choice(alive or sorted(workers))

    def do_kill_worker(self) -> None:
        self.crew.workers[self.some_slot()].kill()

    def do_stop_worker(self) -> None:
        """A worker sleeps; now and then it is taken for dead and another does its tasks when it wakes."""
        slot = self.some_slot()
        self.stop_for(self.rng.uniform(0.05, self.setup.longest_sleep_s), self.crew.workers[slot].signal)
        if self.rng.random() < 0.5 and self.setup.starts_afresh:
            self.crew.replace(slot)

    def stop_for(self, seconds: float, send: Callable[[signal.Signals], None]) -> None:
        send(signal.SIGSTOP)
        self.after(seconds, lambda: send(signal.SIGCONT))

    def stop_pid_for(self, seconds: float, pid: int) -> None:
        self.stop_for(seconds, lambda number: signalled(pid, number))

    def do_kill_service(self) -> None:
        self.rng.choice(self.setup.services).process.kill()

    def do_stop_service(self) -> None:
        service = self.rng.choice(self.setup.services)
        self.stop_for(self.rng.uniform(0.05, 1.8 * TTL_S), service.process.signal)

    def do_restore(self) -> None:
        """The state goes back to a backup; an operator opens the servers, at once or later."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.json"
            self.insist(lambda manager: write_backup(manager.store, path))
            time.sleep(self.rng.uniform(0.0, 0.8))
            self.insist(lambda manager: restore(manager.store, read_backup(path), force=True))
        self.after(self.rng.choice((0.0, TTL_S + 1.0)), self.open_servers)

    def open_servers(self) -> None:
        for server in inventory():
            self.insist(methodcaller("resume", server.name))

    def do_newer_change(self) -> None:
        """A newer process writes what the older build does not know; that one is upgraded a little later."""
        times = {"from": "2126-12-01T08:00Z", "until": "2126-12-02T08:00Z"}
        window = WindowForm.of(servers=["gpu-server-0"], **times)
        self.insist(lambda manager: manager.add_maintenance(window))
        self.outdated_since = time.monotonic()
        self.after(self.rng.uniform(1.0, 2.0) * TTL_S, self.crew.upgrade)

    def insist(self, step: Callable[[GPUResourceManager], object]) -> None:
        """Does what an operator repeats while the store does not answer; faults end meanwhile.

        Else a process that was stopped in its transaction kept the file of SQLite locked for good.
        """
        deadline = time.monotonic() + 60.0
        while True:
            try:
                with self.setup.manager() as manager:
                    step(manager)
                return
            except (StoreUnavailableError, LockTimeoutError):
                if time.monotonic() > deadline:
                    raise
                self.wait_until(time.monotonic())

    # ---- the way to Redis ----

    def some_proxies(self) -> list[Proxy]:
        return self.rng.sample(self.setup.proxies, self.rng.randint(1, len(self.setup.proxies)))

    def do_lose_answers(self) -> None:
        self.rng.choice(self.setup.proxies).lose_answers += self.rng.randint(1, 4)

    def do_repeat_requests(self) -> None:
        self.rng.choice(self.setup.proxies).repeat += self.rng.randint(1, 8)

    def do_cut(self) -> None:
        self.rng.choice(self.setup.proxies).cut()

    def do_partition(self) -> None:
        self.for_a_while("partitioned", True, False, self.rng.uniform(0.1, 1.5 * TTL_S))

    def do_delay(self) -> None:
        self.for_a_while("delay_s", self.rng.uniform(0.001, 0.1), 0.0, self.rng.uniform(0.2, 1.0))

    def for_a_while(self, name: str, value: Any, before: Any, seconds: float) -> None:
        targets = self.some_proxies()

        def put(what: Any) -> None:
            for target in targets:
                setattr(target, name, what)

        put(value)
        self.after(seconds, lambda: put(before))

    def do_link_down(self) -> None:
        zone = self.rng.choice(cast(Namespaces, self.setup).zones)
        zone.cut()
        self.after(self.rng.uniform(0.1, 1.5 * TTL_S), zone.join)

    def do_packet_loss(self) -> None:
        zone = self.rng.choice(cast(Namespaces, self.setup).zones)
        zone.heal()
        zone.lose(self.rng.uniform(0.05, 0.4))
        self.after(self.rng.uniform(0.3, 1.5), zone.heal)

    def do_link_delay(self) -> None:
        zone = self.rng.choice(cast(Namespaces, self.setup).zones)
        delay = f"{self.rng.uniform(1, 50):.1f}ms"
        zone.shape("delay", delay, delay, "reorder", "25%", "duplicate", "10%", "loss", "5%")
        self.after(self.rng.uniform(0.3, 1.5), zone.heal)

    # ---- Redis ----

    def do_restart_redis(self) -> None:
        self.setup.server.kill()
        time.sleep(self.rng.uniform(0.0, 0.3))
        self.setup.server.start()
        self.rest()

    def do_wipe_redis(self) -> None:
        """It comes back empty; an operator waits until all leases are over, and resets it."""
        self.do_restart_redis()
        self.after(TTL_S + 1.5, self.reset)

    def reset(self) -> None:
        try:
            with self.setup.manager() as manager:
                manager.reset_resources()
        except StoreUnavailableError:  # it is stopped, and goes on after this
            self.after(0.1, self.reset)

    def do_jump_clock(self) -> None:
        """The clock of the host of Redis is set, forward or back."""
        assert self.setup.clock is not None
        seconds = self.rng.choice((-3600, -20, 20, 3600))
        self.jumps.append((time.monotonic(), seconds))
        self.setup.clock.jump(seconds)
        self.rest()

    def do_stop_redis(self) -> None:
        self.stop_for(self.rng.uniform(0.05, 1.0), self.setup.server.process.send_signal)

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
        group = cast(Sentinels, self.setup).group
        replica = group.replica.process.pid
        signalled(replica, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.0, 0.2))
        group.primary.kill()
        signalled(replica, signal.SIGCONT)
        self.rest()

    def configure(self, name: str, value: str) -> None:
        self.command("CONFIG", "SET", name, value)

    def command(self, *words: str) -> None:
        signalled(self.setup.server.process.pid, signal.SIGCONT)
        with self.setup.server.client() as client:
            client.execute_command(*words)

    # ---- PostgreSQL ----

    def do_restart_postgres(self) -> None:
        cast(Variables, self.setup).postgres.restart(self.rng.uniform(0.0, 0.3))

    def do_stop_postgres(self) -> None:
        for pid in cast(Variables, self.setup).postgres.pids():
            self.stop_pid_for(self.rng.uniform(0.05, 1.0), pid)

    # ---- databases ----

    def do_restart_database(self) -> None:
        cast(Databases, self.setup).database.restart(self.rng.uniform(0.0, 0.3))

    def do_stop_database(self) -> None:
        seconds = self.rng.uniform(0.05, 1.0)
        for pid in cast(Databases, self.setup).database.pids():
            self.stop_pid_for(seconds, pid)

    def do_lock_file(self) -> None:
        file = sqlite3.connect(cast(OnSQLite, self.setup).file, isolation_level=None, timeout=1.0)
        with suppress(sqlite3.OperationalError):  # the workers were quicker
            file.execute("BEGIN IMMEDIATE")
        self.after(self.rng.uniform(0.05, 1.0), file.close)

    # ---- Airflow ----

    def do_kill_supervisor(self) -> None:
        """Its task ends with it, and Airflow has to miss both before it starts another try."""
        for pid in self.some_supervisors():
            signalled(pid, signal.SIGKILL)

    def do_stop_supervisor(self) -> None:
        for pid in self.some_supervisors():
            self.stop_pid_for(self.rng.uniform(0.05, self.setup.longest_sleep_s), pid)

    def some_supervisors(self) -> list[int]:
        return cast(AirflowTask, self.crew.workers[self.some_slot()]).supervisors()

    def do_stop_api_server(self) -> None:
        for pid in cast(Tasks, self.setup).airflow.api_servers():
            self.stop_pid_for(self.rng.uniform(0.05, self.setup.longest_sleep_s), pid)
