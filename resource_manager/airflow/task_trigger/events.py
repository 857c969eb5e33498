"""Events that triggers send to the tasks that they resume, as models; they cross as plain values."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from resource_manager.core.identifiers import as_reason

_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that PostgreSQL, or UTF-8, does not have."""


def storable(value: Any) -> Any:
    """Return plain values with U+FFFD for each character that Airflow's database may refuse.

    A triggerer ends, with all its triggers, by an event that it cannot store, and so does the next one.
    """
    if isinstance(value, str):
        return _NOT_STORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {storable(name): storable(part) for name, part in value.items()}
    return [storable(part) for part in value] if isinstance(value, list) else value


class Event(BaseModel):
    """Event of a trigger."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def plain(self) -> dict[str, Any]:
        """Return the event as plain values."""
        return self.model_dump(mode="json", exclude_defaults=True)


class GrantState(StrEnum):
    """How a wait for GPUs ended."""

    GRANTED = "granted"
    REQUEST_LOST = "request_lost"
    MAX_WAIT_EXCEEDED = "max_wait_exceeded"


class GrantEvent(Event):
    """End of a wait for GPUs, and for the task's own log its length and its reasons."""

    state: GrantState
    waited_s: float = 0.0
    reasons: list[str] = Field(default_factory=list)


class Vacancy(Event):
    """Server that has free GPUs; None with a `detail` if no server can ever fit the request."""

    server_name: str | None = None
    detail: str = ""
    reasons: list[str] = Field(default_factory=list)


class EndState(StrEnum):
    """How a task's job, or its way to one, ended."""

    JOB_ENDED = "job_ended"
    JOB_UNREACHABLE = "job_unreachable"
    LEASE_LOST = "lease_lost"
    TIMED_OUT = "timed_out"
    IDLE = "idle"
    GPU_FAILED = "gpu_failed"
    NOT_STARTED = "not_started"
    MAX_WAIT_EXCEEDED = "max_wait_exceeded"
    NEVER_FITS = "never_fits"
    FAILED = "failed"


class TaskEnd(Event):
    """End of a task: the result of its job, or in `detail` why there is none.

    `rank` and `server` are those of the member of a gang that it is about, `tails` the last lines of
    members by rank.
    """

    state: EndState
    fencing_token: int = 0
    exit_code: int | None = None
    last_line: str = ""
    detail: str = ""
    rank: int | None = None
    server: str = ""
    tails: dict[int, list[str]] = Field(default_factory=dict)
    gpu_usage: dict[str, Any] | None = None
    waited_s: float | None = None
    reasons: list[str] = Field(default_factory=list)

    @property
    def has_succeeded(self) -> bool:
        return self.state is EndState.JOB_ENDED and self.exit_code == 0

    @property
    def reason(self) -> str:
        """Reason of the release, for the history."""
        if self.detail or self.state is not EndState.JOB_ENDED:
            return as_reason(self.detail or self.state.replace("_", " "))
        return "no exit code" if self.exit_code is None else f"exit code {self.exit_code}"
