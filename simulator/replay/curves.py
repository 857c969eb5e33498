"""Data of a report's figures, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from simulator.replay import metrics
from simulator.replay.fairness import fairness
from simulator.replay.job_runs import Record

MAX_VALUES = 400
"""Values kept of a distribution, besides its last."""


def curve_data(record: Record, uses: Iterable[metrics.Use] | None = None) -> dict[str, Any]:
    """Return means over each sixtieth of the time, and some of the waits, completion times and fairness.

    `uses` of the servers are those of the leases unless they are given.
    """
    waits = sorted(
        metrics.wait_s(job_run) for job_run in record.job_runs.values() if job_run.started_at is not None
    )
    completions = sorted(
        job_run.ended_at - job_run.job.submitted_at
        for job_run in record.job_runs.values()
        if job_run.ended_at is not None
    )
    nodes, shares, start, end = metrics.busy_shares(record, uses=uses)
    at_s, used, total, pending = metrics.binned(record)
    return {
        "curve": {
            "at_s": at_s,
            "allocated_percent": [
                100 * part / max(whole, 1) for part, whole in zip(used, total, strict=True)
            ],
            "waiting": pending,
        },
        "waits_s": _some(waits),
        "jct_s": _some(completions),
        "ftf": _some(sorted(fairness(record).values())),
        "heat": {"nodes": nodes, "shares": shares, "end_s": end - start},
    }


def _some(values: list[float]) -> list[float]:
    step = max(math.ceil(len(values) / MAX_VALUES), 1)
    last = values[-1:] if (len(values) - 1) % step else []
    return values[::step] + last
