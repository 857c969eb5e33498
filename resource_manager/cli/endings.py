"""End of a job in a terminal: the exit code of its command, and what the history says of its lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resource_manager.cli.session import say
from resource_manager.core.changes import Outcome
from resource_manager.jobs.job_preemption import is_time_over

GPU_FAILED, PREEMPTED, TIMED_OUT, KILLED, TERMINATED = 74, 75, 124, 137, 143
"""Exit codes: two of `sysexits.h`, an error of a device and "try again later"; others as shells have them."""


@dataclass(frozen=True, slots=True)
class Ending:
    """End of the attended job, and what the history says of its lease."""

    exit_code: int
    outcome: Outcome
    reason: str = ""


def ending_by_itself(code: int, lease: Mapping[str, Any], preemption: str) -> Ending:
    """Return the end of a job that nobody here ended, by its exit code, and say why."""
    if code == 0:
        return Ending(0, Outcome.SUCCESS, "exit code 0")
    if preemption and is_time_over(lease):
        return Ending(TIMED_OUT, Outcome.EVICTED, preemption)
    if preemption:
        say("it was preempted and does not wait again by itself: run the command again")
        return Ending(PREEMPTED, Outcome.EVICTED, preemption)
    code = code if code > 0 else 128 - code
    if code in (KILLED, TERMINATED):
        how = "SIGTERM" if code == TERMINATED else "SIGKILL"
        say(f"the command was stopped by {how} from elsewhere, as gpu-manager stop does")
    return Ending(code, Outcome.FAILED, f"exit code {code}")
