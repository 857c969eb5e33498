"""Limits at which a lease is preempted for nobody: idle GPUs, the longest runtime, the end of its turn."""

from __future__ import annotations

from enum import StrEnum

from resource_manager.core.models import KEY_SEPARATOR

IDLE = f"{KEY_SEPARATOR}idle"
MAX_RUNTIME = f"{KEY_SEPARATOR}max_runtime"
REQUEUE_AFTER = f"{KEY_SEPARATOR}requeue_after"

LIMITS = {
    IDLE: "its GPUs computed nothing for too long",
    MAX_RUNTIME: "its longest runtime is over",
    REQUEUE_AFTER: "its turn is over (requeue_after)",
}
"""Preemptors that are no requests -> why they end a lease, in words."""


class IdleAction(StrEnum):
    """What becomes of a lease that has computed nothing for too long."""

    WARN = "warn"
    RELEASE = "release"


class OnIdle(StrEnum):
    """What becomes of the task of a lease that was released as idle."""

    END = "end"
    REQUEUE = "requeue"


def in_words(preemptor: str, name: str) -> str:
    """Return why a lease is preempted; `name` is that of the preemptor where it is a request or a window."""
    return f"preempted: {LIMITS[preemptor]}" if preemptor in LIMITS else f"preempted for {name}"
