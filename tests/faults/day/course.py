"""The course of the day: when jobs come, what fails and when, and what is known at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from demo.stack import StackError, wait_until
from resource_manager.core.changes import Change, JobEnd
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.faults.day import plan
from tests.faults.day.by_hand import Desks, renamed
from tests.faults.day.fleet import Fleet
from tests.faults.day.plan import name_of
from tests.faults.day.proof import Evidence, Look

WINDOW = range(40, 45)
"""Servers of the maintenance window; those before them may lose a GPU, or vanish."""

CUT_PART = 0.12
"""Part of the day for which a server that is cut off stays so."""

LOST_PART = 0.02
"""Part of the day that the restore loses."""

AFTER_CUT_S = 75.0
"""Time after which a job whose caller could not reach it any more has ended, with some time to be noticed."""

LIMIT_FACTOR = 3.0
"""Times the length of the day after which what still runs counts as lost."""

LOOK_S = 2.0
"""Time between two looks at the queue, from the outside."""


class Course:
    """One day of a running stack: `live` goes through it."""

    def __init__(
        self, day: Any, fleet: Fleet, restart: Callable[[], None], desks: Desks, day_s: float
    ) -> None:
        self._day, self._fleet, self._restart, self._desks = day, fleet, restart, desks
        self._day_s = day_s
        self._began = time.time()
        self._window = (self._began + 0.5 * day_s, self._began + 0.65 * day_s)
        self._runs: dict[str, str] = {}
        self._faults: list[tuple[float, str]] = []
        self._dead: list[tuple[int, int]] = []
        self._vanished = -1
        self._cuts: list[tuple[int, float, float]] = []
        self._history: dict[int, Change] = {}
        self._backup_at = self._restored_at = 0.0
        self._pauses: list[tuple[float, float]] = []
        self._looks: list[Look] = []
        self._over = threading.Event()

    def live(self) -> Evidence:
        """Let jobs come and things fail until all jobs have ended; return what is known then."""
        watch = threading.Thread(target=self._watch_queue, daemon=True)
        watch.start()
        for at, what, act in sorted(self._happening(), key=lambda each: each[0]):
            time.sleep(max(self._began + at * self._day_s - time.time(), 0.0))
            if what:
                self._faults.append((time.time(), what))
                print(f"{time.time() - self._began:6.1f} s  {what}", flush=True)
            act()
        left_s = self._began + LIMIT_FACTOR * self._day_s - time.time()
        try:
            wait_until(
                lambda: self._desks.have_ended and self._day.ended(self._runs),
                left_s,
                "not every job ended",
                pause_s=2.0,
            )
        except StackError as error:
            print(error, file=sys.stderr)
        print(f"{time.time() - self._began:6.1f} s  the last job ends", flush=True)
        ended = time.time()
        self._over.set()
        watch.join()
        self._sweep()
        return self._evidence(ended)

    def _watch_queue(self) -> None:
        """Note for each pending request when it should start, and why it waits."""
        while not self._over.wait(LOOK_S):
            with suppress(ResourceManagerError):
                now, queue = time.time(), self._day.manager.queue()
                self._looks += [Look.of(now, entry) for entry in queue]

    def _happening(self) -> list[tuple[float, str, Callable[[], object]]]:
        """Return what happens, at parts of the day."""
        waves = enumerate(plan.arrivals())
        return [
            *((at, "", lambda wave=wave: self._arrive(wave)) for wave, at in waves),
            (0.1, "a maintenance window is announced", self._announce),
            (0.2, "a GPU dies", self._lose_gpu),
            (0.3, "Redis fails over", self._fail_over),
            (0.4, "a server vanishes", self._vanish),
            (0.44, "an operator drains it as failed, and releases its leases", self._drain),
            (0.15, "a server is cut off", self._cut),
            (0.15 + CUT_PART, "it can be reached again", self._join),
            (0.47, "service, agents and Airflow are upgraded", self._upgrade),
            (0.5, "another server is cut off", self._cut),
            (0.5 + CUT_PART, "it can be reached again", self._join),
            (0.6, "another GPU dies", self._lose_gpu),
            (0.7 - LOST_PART, "", self._back_up),
            (0.7, "the state goes back to a backup", self._restore),
            (0.75, "an operator has looked at the workers' machine, and opens it", self._open_workers),
        ]

    def _arrive(self, wave: int) -> None:
        dag_id = f"day_{wave:02}"
        of_wave = [job for job in self._day.jobs if job.dag_id == dag_id]
        self._desks.begin(job for job in of_wave if job.by_hand)
        if not all(job.by_hand for job in of_wave):
            self._runs[dag_id] = self._day.api.trigger(dag_id)

    def _announce(self) -> None:
        begin, end = (datetime.fromtimestamp(at, UTC) for at in self._window)
        times = {"from": begin, "until": end}
        servers = [name_of(number) for number in WINDOW]
        form = WindowForm.of(servers=servers, reason="new fans", preempt=True, **times)
        self._day.manager.add_maintenance(form)

    def _fail_over(self) -> None:
        self._day.group.primary.kill()
        self._day.group.wait_until_led()
        self._pauses.append((time.time(), time.time() + self._day.window_s))

    def _upgrade(self) -> None:
        began = time.time()
        self._restart()
        self._pauses.append((began, time.time()))

    def _back_up(self) -> None:
        self._backup_at = time.time()
        write_backup(self._day.manager.store, self._day.home / "backup.json")

    def _restore(self) -> None:
        self._note_history()  # some of it goes with the state
        begun_at = time.time()
        restore(self._day.manager.store, read_backup(self._day.home / "backup.json"), force=True)
        self._restored_at = time.time()  # what was granted while it was read is lost, too
        self._pauses.append((begun_at, self._restored_at + self._day.window_s))

    def _open_workers(self) -> None:
        """No agent searches it; what ran there without a lease is over by now."""
        self._day.manager.resume(plan.WORKERS)

    def _note_history(self) -> None:
        self._history.update(self._day.manager.store.history(0, 1_000_000))

    def _in_use(self, *, by_hand: bool = False) -> tuple[int, int]:
        """Return a server and a GPU there that a job holds, that of a terminal if asked; else any of both."""
        away = {self._vanished, *self._fleet.out_of_reach}
        for lease in self._day.manager.leases():
            if lease["server_name"] == plan.WORKERS:
                continue
            number, gpus = int(lease["server_name"].rpartition("-")[2]), lease["gpu_ids"]
            if by_hand and not (lease["task_id"].startswith("hand:") and lease["job_places"]):
                continue
            if number < WINDOW[0] and number not in away and gpus[0] in self._fleet.gpus[number]:
                return number, gpus[0]
        there = next(number for number in range(WINDOW[0]) if number not in away)
        return there, min(self._fleet.gpus[there])

    def _lose_gpu(self) -> None:
        self._dead.append(self._in_use())
        self._fleet.lose_gpu(*self._dead[-1])

    def _vanish(self) -> None:
        self._vanished = self._in_use()[0]
        self._fleet.vanish(self._vanished)

    def _cut(self) -> None:
        server, _ = self._in_use(by_hand=True)
        self._fleet.cut(server)
        now = time.time()
        self._cuts.append((server, now, now + CUT_PART * self._day_s + AFTER_CUT_S))

    def _join(self) -> None:
        for server in list(self._fleet.out_of_reach):
            self._fleet.join(server)

    def _sweep(self) -> None:
        """Stop what is left of jobs whose callers lost them, as an operator does."""
        left = [lease["task_id"] for lease in self._day.manager.leases() if lease["state"] == "ERROR"]
        self._desks.stop_leases(lease_id for lease_id in left if lease_id.startswith("hand:"))

    def _drain(self) -> None:
        manager, vanished = self._day.manager, name_of(self._vanished)
        manager.drain(vanished, failed=True, reason="it does not answer")
        for lease in manager.leases():
            there = [each["rank"] for each in lease["members"] if each["server_name"] == vanished]
            if there:  # these members are known to be gone; if that is not all, the others are ended
                manager.release_members(
                    lease["task_id"],
                    there,
                    fencing_token=lease["fencing_token"],
                    job_end=JobEnd.GONE,
                    reason="its server is dead",
                )

    def _is_lost(self, lease: Any) -> bool:
        return {member["server_name"] for member in lease["members"]} == {name_of(self._vanished)}

    def _evidence(self, ended: float) -> Evidence:
        manager = self._day.manager
        self._note_history()
        begin, end = self._window
        leases = (lease["task_id"] for lease in manager.leases() if not self._is_lost(lease))
        changes = [change for _, change in sorted(self._history.items(), key=lambda each: each[0])]
        names = self._desks.names(changes)
        beats = [{**beat, "task": names.get(beat["task"], beat["task"])} for beat in self._day.beats()]
        return Evidence(
            jobs=self._day.jobs,
            began=self._began,
            ended=ended,
            faults=[
                *self._faults,
                (begin, "the maintenance window begins"),
                (end, "the maintenance window ends"),
            ],
            tasks={**self._day.tasks(self._runs), **self._desks.tasks},
            beats=beats,
            changes=[renamed(change, names) for change in changes],
            left=[*leases, *(entry["task_id"] for entry in manager.queue())],
            dead_gpus=[(name_of(server), gpu) for server, gpu in self._dead],
            vanished=name_of(self._vanished),
            cuts=[(name_of(server), begin, end) for server, begin, end in self._cuts],
            window=([name_of(number) for number in WINDOW], begin, end),
            lost=(self._backup_at, self._restored_at),
            pauses=self._pauses,
            looks=[look.named(names) for look in self._looks],
            load=os.getloadavg()[2],
        )
