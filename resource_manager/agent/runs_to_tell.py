"""What a report tells of the jobs of its agent: no more than the service takes."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from resource_manager.agent.probe import MAX_JOBS, MAX_REPORT_BYTES

RUNS_BYTES = MAX_REPORT_BYTES // 2
"""Most bytes of a report that tell of jobs: one that is too large is refused, and its server is silent."""

LINES_BYTES = RUNS_BYTES // 2
"""How many of them tell of jobs with the last lines of their output."""


def runs_to_tell(states: Mapping[str, dict[str, Any]], wanted: Container[str]) -> list[dict[str, Any]]:
    """Return the states that are told: of the jobs that are wanted, and of all others until they are ended.

    One that runs is told also with its tombstone: who wrote that may have failed, or been stopped, since.
    Those come first, then what runs, then what ended last, with last lines as long as there is room for
    these. Others are told once some of these are ended.
    """
    runs = [run for key, run in states.items() if key in wanted or _is_to_end(run)]
    runs.sort(
        key=lambda run: (run["key"] not in wanted, run["state"] != "running", -(run["ended_at"] or 0.0))
    )
    told: list[dict[str, Any]] = []
    size = 0
    for run in runs[:MAX_JOBS]:
        told.append(run if size < LINES_BYTES else {**run, "last_line": ""})
        size += len(json.dumps(told[-1]))
        if size > RUNS_BYTES:
            return told[:-1]
    return told


def _is_to_end(run: Mapping[str, Any]) -> bool:
    return run["state"] == "running" or not run["ended"]
