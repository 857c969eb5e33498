"""What a waiting task writes into its log, and what it remembers of the wait for the moment it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from resource_manager.views import duration

REASON_EVERY_S = 60.0
"""How often figures within one kind of reason are told anew: on a busy cluster they change all the time."""

STANDING_EVERY_S = 600.0
"""How often a change of place or expected start is told while the reason stays."""

KEPT_REASONS = 5


class WaitingLog:
    """Says when a line is due, and keeps the reasons: a trigger's lines can vanish from the task's log."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        """The last reasons in order, one for each time that the kind changed; plain values for an event."""
        self._kind: str | None = None
        self._reason = ""
        self._line = ""
        self._told_at = float("-inf")

    def due(self, kind: str | None, reason: str, line: str, now_s: float) -> bool:
        """Whether to write the line now: at once for another kind of reason, else seldom, unchanged never."""
        same_kind = kind == self._kind and bool(self.reasons)
        every_s = REASON_EVERY_S if reason != self._reason else STANDING_EVERY_S
        if same_kind:
            self.reasons[-1] = reason
            if line == self._line or now_s - self._told_at < every_s:
                return False
        else:
            self.reasons = [*self.reasons[1 - KEPT_REASONS :], reason]
        self._kind, self._reason, self._line, self._told_at = kind, reason, line, now_s
        return True


def describe_waiting(status: Mapping[str, Any]) -> str:
    """Where a waiting task stands, why it waits, and until when roughly."""
    line = f"waiting for GPUs: place {status['position']} in the queue, {status['reason']}"
    return f"{line}{describe_start(status.get('estimated_start'))}"


def describe_start(estimate: Mapping[str, Any] | None) -> str:
    """When it should start, and how sure that is; or why nobody knows. Empty where it was not estimated."""
    if estimate is None:
        return ""
    if estimate["at"] is None:
        return f"; start unknown: {estimate['detail']}"
    at = datetime.fromtimestamp(estimate["at"]).astimezone()
    return f"; should start about {at:%H:%M:%S} ({estimate['confidence']})"


def describe_wait(waited_s: float, reasons: Sequence[str]) -> str:
    """The whole wait in one line, once it is over."""
    return f"waited {duration(waited_s)} for GPUs" + (f": {'; then: '.join(reasons)}" if reasons else "")
