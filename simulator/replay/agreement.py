"""How a replay's decisions compare to the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator.replay.job_runs import Record
from simulator.replay.workload import Part


def differences(record: Record) -> list[str]:
    """Return the jobs that the replay placed, started or preempted otherwise than recorded."""

    def decisions(parts: Iterable[Part]) -> list[tuple[Any, ...]]:
        return [
            (part.lease.granted_at, part.lease.members, part.preempted_at, part.preempted_by)
            for part in parts
        ]

    return [
        task_id
        for task_id, job_run in record.job_runs.items()
        if decisions(job_run.job.recorded) != decisions(job_run.leases)
    ]


LONGEST = 20
"""Jobs that are named among those that gain most."""


def compare_with_record(record: Record) -> dict[str, Any]:
    """Return how the replay's decisions compare to the recorded ones, and which jobs start earlier.

    `started_earlier` lists the jobs that gain most, with the seconds gained.
    """
    moved = [
        (task_id, job_run.first_started_at - job_run.job.recorded[0].lease.granted_at)
        for task_id, job_run in record.job_runs.items()
        if job_run.job.recorded and job_run.first_started_at is not None
    ]
    earlier = sorted((shift, task_id) for task_id, shift in moved if shift < 0)
    different = len(differences(record))
    return {
        "decisions": len(record.job_runs),
        "same": len(record.job_runs) - different,
        "different": different,
        "earlier": len(earlier),
        "later": sum(shift > 0 for _, shift in moved),
        "started_earlier": [
            {"task_id": task_id, "earlier_s": round(-shift, 3)} for shift, task_id in earlier[:LONGEST]
        ],
    }
