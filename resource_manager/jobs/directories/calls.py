"""Calls by a process elsewhere, and their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from resource_manager.jobs.directories import attending, ending, job_states, starting
from resource_manager.jobs.directories.job_files import ANY, RefusedError, machine, verify

ACTS: dict[str, Callable[..., Any]] = {
    act.__name__: act
    for act in (
        *(starting.prepare, starting.start, starting.stage, attending.sign),
        *(job_states.status, job_states.logs, job_states.tail, job_states.running),
        *(ending.terminate, ending.preempt, ending.stop),
    )
}


def answer(
    call: dict[str, Any], acts: Mapping[str, Callable[..., Any]] = ACTS, here: Callable[[], str] = machine
) -> None:
    """Execute a remote call {"do": name, "place": its place or None, ...arguments}; print a line of JSON.

    It is {"refused": class of the error, "reason": its text} for a `RefusedError`.
    """
    act, place = acts[call.pop("do")], call.pop("place")
    try:
        if place is not None:
            verify(call.get("key", ANY), place, here())
        found = act(**call) or {}
    except RefusedError as error:
        found = {"refused": type(error).__name__, "reason": str(error)}
    print("\n" + json.dumps(found))
