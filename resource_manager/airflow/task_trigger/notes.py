"""Notes of a try in its XComs, by which the trigger goes on where an earlier one of that try was ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from resource_manager.airflow.task_trigger.events import storable
from resource_manager.airflow.version_compat import get_xcom, set_xcom
from resource_manager.jobs.task_identity import TaskIdentity

ALLOCATION = "allocation"
"""XCom with the lease of the task."""

LOG_PLACE = "job_log_place"
"""XCom with the part of the job's output that is in the task's log."""

TASK_NOTES = "gpu_task"
"""XCom with the other notes."""


class TaskNotes:
    """Notes of one try: the preemptions of its request and `before_s` from its arrival to this wait, the
    attempt to start a gang, and when the job of which lease was started.

    What cannot be stored or read is only logged.
    """

    def __init__(self, identity: TaskIdentity, log: Any) -> None:
        self._task_instance = asdict(identity)
        del self._task_instance["instance"]
        self._log = log
        self._kept: dict[str, Any] = {}

    async def recall(self) -> None:
        """Read what an earlier trigger of this try noted."""
        self._kept = await self._read(TASK_NOTES) or {}

    @property
    def before_s(self) -> float:
        return float(self._kept.get("before_s", 0.0))

    @property
    def restarts(self) -> int:
        return int(self._kept.get("restarts", 0))

    @property
    def attempt(self) -> int:
        return int(self._kept.get("attempt", 1))

    def started_at(self, token: int) -> float | None:
        """Return when the job of the lease with that fencing token was started, if it was."""
        at = self._kept.get("started_at")
        return float(at) if at is not None and self._kept["started_token"] == token else None

    async def keep(self, **notes: Any) -> None:
        """Store these beside the others."""
        self._kept |= notes
        await self.share(TASK_NOTES, self._kept)

    async def share(self, key: str, value: Any) -> None:
        """Store an XCom that others read, too."""
        try:
            await set_xcom(key, storable(value), **self._task_instance)
        except Exception as error:
            self._log.warning("%s is not stored, which a restart of the triggerer needs: %s", key, error)

    async def log_place(self, key: str) -> tuple[int, str]:
        """Return up to where the job's output is in the log, and the last line before that."""
        place = await self._read(LOG_PLACE)
        if place is None or place["job"] != key:
            return 0, ""
        return int(place["offset"]), str(place["last_line"])

    async def keep_log_place(self, key: str, offset: int, last_line: str) -> None:
        await self.share(LOG_PLACE, {"job": key, "offset": offset, "last_line": last_line})

    async def _read(self, key: str) -> Any:
        try:
            return await get_xcom(key, **self._task_instance)
        except Exception as error:
            self._log.warning("%s cannot be read; output may appear twice in this log: %s", key, error)
            return None
