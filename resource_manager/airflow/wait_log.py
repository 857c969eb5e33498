"""Log lines of a task whose request is pending, and the reasons of the wait that its event carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from resource_manager.core.maintenance import as_text
from resource_manager.manager.answer_words import duration
from resource_manager.manager.serializers import ONE_COURSE, is_of_one_course

REASON_EVERY_S = 60.0
"""Interval for changed figures within one kind of reason: on a busy cluster they change all the time."""

STANDING_EVERY_S = 600.0
"""Interval for a changed queue position or expected start while the reason stays the same."""

KEPT_REASONS = 5


class WaitLog:
    """Decide when a line is due, and keep the reasons: a trigger's lines can vanish from the task's log."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        """Last reasons in order, one for each change of the kind; plain values for an event."""
        self._kind: str | None = None
        self._reason = ""
        self._line = ""
        self._told_at = float("-inf")

    def due(self, kind: str | None, reason: str, line: str, now_s: float) -> bool:
        """Return whether to log the line: at once for a new kind of reason, never if it is unchanged.

        A change within the same kind is due after `REASON_EVERY_S` or `STANDING_EVERY_S`.
        """
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


class DeadlineLog:
    """One line in a task's log when its deadline is at risk, and one when it is not any more."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._is_late = False

    def see(self, entry: Mapping[str, Any]) -> None:
        """Look at a pending request or lease as last told."""
        if (entry.get("late_end") is not None) != self._is_late:
            self._is_late = not self._is_late
            risk = "is not at risk any more"
            if self._is_late:
                risk = f"is at risk: the task should end by {as_text(entry['late_end'])}"
            self._log.warning("the deadline %s %s", as_text(entry["deadline_at"]), risk)


def describe_waiting(status: Mapping[str, Any]) -> str:
    """Return a line with a pending request's queue position, reason and estimated start."""
    line = f"waiting for GPUs: position {status['position']} in the queue, {status['reason']}"
    return f"{line}{describe_start(status.get('estimated_start'), status['reason'])}"


def describe_vacancy(answer: Mapping[str, Any]) -> str:
    """Return a line with the reason why a sensor still waits, and the estimated start."""
    reason = answer["reason"]
    return f"waiting for free GPUs: {reason}{describe_start(answer.get('estimated_start'), reason)}"


def describe_start(estimate: Mapping[str, Any] | None, reason: str = "") -> str:
    """Return the estimated start, its interval and the lease it waits for, or why it is unknown.

    Empty without an estimate. Why it is unknown is omitted where it is the `reason` of the wait.
    """
    if estimate is None:
        return ""
    if estimate["at"] is None:
        return "; start unknown" if estimate["detail"] == reason else f"; start unknown: {estimate['detail']}"
    sure = str(estimate["confidence"])
    if is_of_one_course(estimate):
        sure = ONE_COURSE
    elif (earliest := estimate.get("earliest")) is not None and earliest != (latest := estimate["latest"]):
        sure = f"{_clock(earliest)} to {'later' if latest is None else _clock(latest)}, {sure}"
    after = f", when {estimate['after']} ends" if estimate.get("after") else ""
    on = datetime.fromtimestamp(estimate["at"]).astimezone()  # Airflow's pages show other times in their zone
    return f"; should start about {_clock(estimate['at'])} {on:%Z} ({sure}){after}"


def _clock(at: float) -> str:
    """Return a time of today as 14:03:09, another one with its date."""
    on = datetime.fromtimestamp(at)
    return f"{on:%H:%M:%S}" if on.date() == datetime.now().date() else f"{on:%Y-%m-%d %H:%M}"


def describe_wait(waited_s: float, reasons: Sequence[str]) -> str:
    """Return a summary of the finished wait in one line."""
    return f"waited {duration(waited_s)} for GPUs" + (f": {'; then: '.join(reasons)}" if reasons else "")
