"""Trigger that watches a job on Slurm: its wait, its output and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from airflow.triggers.base import TriggerEvent

from resource_manager.airflow.slurm.board import SlurmBoard
from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.task_trigger.base import TaskBoundTrigger, launcher_threads
from resource_manager.airflow.task_trigger.events import Event
from resource_manager.airflow.task_trigger.notes import TaskNotes
from resource_manager.airflow.version_compat import in_thread
from resource_manager.airflow.wait_log import WaitLog, describe_start
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import LauncherError
from resource_manager.jobs.launchers.slurm import Said, SlurmLauncher
from resource_manager.jobs.task_identity import TaskIdentity

NOTE_EVERY_S = 30.0

MAX_STEP_S = 60.0
"""Longest time from one answer to the next; what exceeds it is time in which the triggerer stood still."""


class SlurmEvent(Event):
    """Event of the trigger: how far the job's output is in the task's log, and its last line there.

    `unreachable` is why Slurm could not be asked, empty if it said that a worker has to go on.
    """

    offset: int
    last_line: str
    reasons: list[str]
    unreachable: str = ""


def copy_output(text: str, log: Any) -> str:
    """Write output of the job to the task's log; return its last line that is not empty."""
    last_line = ""
    for line in text.splitlines():
        last_line = line.strip() or last_line
        log.info("%s", line)
    return last_line


def end_unless_wanted(identity: TaskIdentity, place: JobPlace) -> bool:
    """End the job of a task that a user ended, not of one that was cleared; return whether it was ended."""
    if is_wanted(identity):
        return False
    with closing(SlurmLauncher(place)) as launcher:
        launcher.stop(launcher.current(identity.lease_id))
    return True


@dataclass(eq=False, repr=False)
class SlurmTrigger(TaskBoundTrigger):
    """Fire when the job does not run or never will, or was out of reach for `unreachable_s`."""

    key: str
    place: dict[str, str]
    unreachable_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._place = JobPlace(**self.place)
        self._notes = TaskNotes(self.identity, self.log)
        self._waits = WaitLog()
        self._runs = False
        self._offset = 0
        self._last_line = ""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield await self._fire(await self._watch())

    async def _watch(self) -> SlurmEvent:
        board, clock = SlurmBoard.of(self._place, self.gpu_conn_id), asyncio.get_running_loop().time
        self._offset, self._last_line = await self._notes.log_place(self.key)
        asked_at = noted_at = clock()
        silent_s = 0.0
        while True:
            try:
                seen = await board.seen(self.key, self._offset)
            except LauncherError as error:
                self.log.warning("Slurm cannot be asked; still watching: %s", error)
                now = clock()
                silent_s, asked_at = silent_s + min(now - asked_at, MAX_STEP_S), now
                if silent_s > self.unreachable_s:
                    return self._event(unreachable=str(error))
                continue
            silent_s, asked_at = 0.0, clock()
            self._offset = seen.offset
            self._last_line = copy_output(seen.text, self.log) or self._last_line
            if not seen.goes_on:
                return self._event()
            assert seen.said is not None  # Slurm has the job
            self._tell(seen.said, clock())
            if clock() - noted_at > NOTE_EVERY_S:
                noted_at = clock()
                await self._notes.keep_log_place(self.key, self._offset, self._last_line)

    def _event(self, unreachable: str = "") -> SlurmEvent:
        return SlurmEvent(
            offset=self._offset,
            last_line=self._last_line,
            reasons=self._waits.reasons,
            unreachable=unreachable,
        )

    def _tell(self, said: Said, now: float) -> None:
        """Write why the job waits, and once where it runs."""
        if said.wait:
            start = {"at": said.begins_at, "server_name": None, "confidence": "by Slurm", "detail": ""}
            estimate = describe_start(start) if said.begins_at else ""
            line = f"waiting on Slurm as job {said.id}: {said.wait}{estimate}"
            if self._waits.due(said.reason, said.wait, line, now):
                self.log.info("%s", line)
        elif not self._runs and said.where:
            self._runs = True
            self.log.info("Slurm runs job %s on %s", said.id, said.where)

    async def on_kill(self) -> None:
        """End the job of a task that a user ended; keep that of a cleared or moved task."""
        if await in_thread(end_unless_wanted, self.identity, self._place, executor=launcher_threads()):
            self.log.info("the task was ended in Airflow; its job on Slurm was ended")
