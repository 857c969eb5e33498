"""Trigger that watches a job on Slurm: its wait, its output and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from pydantic import BaseModel

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.slurm.board import SlurmBoard
from resource_manager.airflow.task_state import is_wanted, note, noted
from resource_manager.airflow.version_compat import in_thread
from resource_manager.airflow.wait_log import WaitLog, describe_start
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import JobState, LauncherError
from resource_manager.jobs.launchers.slurm import Said, Seen
from resource_manager.jobs.task_identity import TaskIdentity

LOG_PLACE = "slurm_log_place"
"""XCom with the part of the job's output that is in the task's log."""

NOTE_EVERY_S = 30.0


class SlurmState(StrEnum):
    """Reason why the trigger fired."""

    ENDED = "ended"
    ABSENT = "absent"
    NEVER_RUNS = "never_runs"
    UNREACHABLE = "unreachable"


class SlurmEnd(BaseModel):
    """Event of the trigger; `detail` is the end or the wait in words, `last_line` the last of the output."""

    state: SlurmState
    detail: str = ""
    exit_code: int | None = None
    last_line: str = ""
    preempted: bool = False
    job_id: str = ""
    where: str = ""
    reasons: list[str] = []


class SlurmTrigger(BaseTrigger):
    """Fire when the job has ended, is not there, can never run, or was out of reach for `unreachable_s`."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        key: str,
        place: Mapping[str, str],
        gpu_conn_id: str = DEFAULT_CONNECTION,
        unreachable_s: float = 600.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arguments = {
            "identity": dict(identity),
            "key": key,
            "place": dict(place),
            "gpu_conn_id": gpu_conn_id,
            "unreachable_s": unreachable_s,
        }
        self.identity = TaskIdentity(**identity)
        self.key = key
        self.place = JobPlace(**place)
        self.gpu_conn_id = gpu_conn_id
        self.unreachable_s = unreachable_s
        self._waits = WaitLog()
        self._runs = False
        self._offset = 0
        self._last_line = ""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", self._arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent((await self._watch()).model_dump(mode="json"))

    async def _watch(self) -> SlurmEnd:
        board, clock = SlurmBoard.of(self.place, self.gpu_conn_id), asyncio.get_running_loop().time
        await self._recall()
        reached_at = noted_at = clock()
        while True:
            try:
                seen = await board.seen(self.key, self._offset)
            except LauncherError as error:
                self.log.warning("Slurm cannot be asked; still watching: %s", error)
                if clock() - reached_at > self.unreachable_s:
                    return SlurmEnd(state=SlurmState.UNREACHABLE, detail=str(error))
                continue
            reached_at = clock()
            self._copy(seen)
            if seen.status.state is JobState.ABSENT:
                return SlurmEnd(state=SlurmState.ABSENT)
            if seen.status.state is JobState.FINISHED:
                return await self._ended(board, seen)
            assert seen.said is not None  # Slurm has the job
            if seen.said.never:
                return SlurmEnd(
                    state=SlurmState.NEVER_RUNS,
                    detail=seen.said.wait,
                    job_id=seen.said.id,
                    reasons=[seen.said.wait],
                )
            self._tell(seen.said, clock())
            if clock() - noted_at > NOTE_EVERY_S:
                noted_at = clock()
                await self._note()

    async def _ended(self, board: SlurmBoard, seen: Seen) -> SlurmEnd:
        while seen.text:
            seen = await board.rest(self.key, self._offset)
            self._copy(seen)
        said = seen.said
        return SlurmEnd(
            state=SlurmState.ENDED,
            detail=said.end if said else "",
            exit_code=seen.status.exit_code,
            last_line=self._last_line,
            preempted=said is not None and said.state == "PREEMPTED",
            job_id=said.id if said else "",
            where=said.where if said else "",
            reasons=self._waits.reasons,
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

    def _copy(self, seen: Seen) -> None:
        """Write the output to the task's log."""
        self._offset = max(seen.offset, self._offset)
        for line in seen.text.splitlines():
            if line.strip():
                self._last_line = line.strip()
            self.log.info("%s", line)

    async def _recall(self) -> None:
        """Go on in the log where an earlier triggerer stopped."""
        try:
            place = await noted(self.identity, LOG_PLACE)
        except Exception as error:  # only the log depends on it
            self.log.warning("the job's output may appear twice in this log: %s", error)
            return
        if place is not None and place["job"] == self.key:
            self._offset, self._last_line = place["offset"], place["last_line"]

    async def _note(self) -> None:
        place = {"job": self.key, "offset": self._offset, "last_line": self._last_line}
        try:
            await note(self.identity, LOG_PLACE, place)
        except Exception as error:
            self.log.warning("log position not saved; a triggerer restart will repeat output: %s", error)

    async def on_kill(self) -> None:
        """End the job of a task that a user ended; keep that of a cleared or moved task."""
        if not await in_thread(is_wanted, self.identity):
            await SlurmBoard.of(self.place, self.gpu_conn_id).stop(self.key)
            self.log.info("the task was ended in Airflow; its job on Slurm was ended")
