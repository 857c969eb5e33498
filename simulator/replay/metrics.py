"""Figures of a replay from its record, and the data of its plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from resource_manager.core.models import MILLI_PER_GPU, Placement
from resource_manager.core.team_ledger import milli_of
from simulator.replay.cluster_samples import Sample
from simulator.replay.job_runs import JobRun, Record
from simulator.stats import mean, percentile

UNFAIR_ABOVE = 1.05
"""Ratio of finish-time fairness above which a job counts as treated unfairly."""

THE_REST = "the rest"
"""Name of all teams without rules."""

SIZES = (
    (1, "jobs of up to 1 GPU"),
    (4, "jobs of up to 4 GPUs"),
    (8, "jobs of up to 8 GPUs"),
    (math.inf, "jobs of over 8 GPUs"),
)


def summarise(record: Record) -> dict[str, Any]:
    """Return the figures of one replay: times in seconds, percentages of the cluster as means over time.

    Waiting times count jobs that started and do not wait again, completion times and fairness those that also
    ended.
    `stated_runtimes` counts the requests that say how long they take, `known_runtimes` the jobs whose run
    time the workload knows. A recorded history also has the mean wait that was recorded.
    """
    job_runs = list(record.job_runs.values())
    waits, completions = waits_s(job_runs), completions_s(job_runs)
    ends = [job_run.ended_at for job_run in job_runs if job_run.ended_at is not None]
    recorded = [job_run.job.waited_s for job_run in job_runs if job_run.job.recorded]
    first = min((job_run.job.submitted_at for job_run in job_runs), default=0.0)
    return {
        "jobs": len(job_runs),
        "started": sum(job_run.first_started_at is not None for job_run in job_runs),
        "ended": len(ends),
        "cancelled": sum(job_run.cancelled for job_run in job_runs),
        "mean_wait_s": _rounded(mean(waits)),
        "p50_wait_s": _rounded(percentile(waits, 50)),
        "p95_wait_s": _rounded(percentile(waits, 95)),
        "max_wait_s": _rounded(waits[-1] if waits else None),
        "mean_jct_s": _rounded(mean(completions)),
        "makespan_s": _rounded(max(ends) - first if ends else None),
        **fairness_figures(record),
        **over_time(record),
        **_by_team(record),
        "waits_of": waits_of([job_run for job_run in job_runs if job_run.started_at is not None]),
        "stated_runtimes": sum(run.job.request.expected_runtime_s is not None for run in job_runs),
        "known_runtimes": sum(run.job.runtime_s < math.inf for run in job_runs),
        **({"recorded_mean_wait_s": _rounded(mean(recorded))} if recorded else {}),
    }


def fairness(record: Record) -> dict[str, float]:
    """Return the finish-time fairness of each job that ended and whose run time is known.

    That is its completion time relative to the one with an equal share of the cluster among all jobs, which
    with more jobs than GPUs is so much slower (Mahajan et al., Themis, NSDI 2020).
    """
    gpus = max((sample.gpu_milli for sample in record.samples), default=0) / MILLI_PER_GPU
    if not gpus:
        return {}
    slower = max(1, len(record.job_runs) / gpus)
    return {
        name: round((run.ended_at - run.job.submitted_at) / (run.job.runtime_s * slower), 5)
        for name, run in record.job_runs.items()
        if run.ended_at is not None and 0 < run.job.runtime_s < math.inf
    }


def fairness_figures(record: Record) -> dict[str, Any]:
    """Return the worst ratio and the percentage of jobs treated unfairly."""
    ratios = list(fairness(record).values())
    unfair = sum(ratio > UNFAIR_ABOVE for ratio in ratios)
    return {
        "worst_ftf": max(ratios, default=None),
        "unfair_percent": round(100 * (unfair / len(ratios)), 2) if ratios else None,
    }


def waits_of(started: Sequence[JobRun]) -> dict[str, list[float]]:
    """Return the number of jobs and their mean wait, by size and, if there are several, by team."""
    groups: dict[str, list[float]] = {}
    teams = {job_run.job.request.team for job_run in started}
    for job_run in started:
        request = job_run.job.request
        gpus = milli_of(request) / MILLI_PER_GPU
        size = next(name for most, name in SIZES if gpus <= most)
        for group in [size, f"team {request.team or '(none)'}"][: 1 + (len(teams) > 1)]:
            groups.setdefault(group, []).append(wait_s(job_run))
    return {name: [len(waits), round(sum(waits) / len(waits), 3)] for name, waits in groups.items()}


def lost_gpu_s(job_run: JobRun) -> float:
    """Return the GPU seconds that a job did over again, since it was preempted after its last checkpoint."""
    return (job_run.ran_s - job_run.saved_s) * milli_of(job_run.job.request) / MILLI_PER_GPU


def _by_team(record: Record) -> dict[str, Any]:
    """Return preemptions, lost work, and the figures of each team with rules; nothing without any."""
    if record.teams is None:
        return {}
    job_runs = list(record.job_runs.values())
    ruled = {team.name: f"{team.guaranteed:g}" for team in record.teams.teams}
    groups: dict[str, list[JobRun]] = {name: [] for name in ruled}
    for job_run in job_runs:
        team = job_run.job.request.team
        groups.setdefault(team if team in ruled else THE_REST, []).append(job_run)
    found = {}
    for name, group in groups.items():
        waits = waits_s(group)
        found[name] = {
            "guaranteed": ruled.get(name, "0"),
            "jobs": len(group),
            "started": len(waits),
            "mean_wait_s": _rounded(mean(waits)),
            "p95_wait_s": _rounded(percentile(waits, 95)),
            "preempted": sum(job_run.preemptions for job_run in group),
            "lost_gpu_s": _rounded(sum(map(lost_gpu_s, group))),
        }
    return {
        "preemptions": sum(job_run.preemptions for job_run in job_runs),
        "lost_gpu_s": _rounded(sum(map(lost_gpu_s, job_runs))),
        "teams": found,
    }


def wait_s(job_run: JobRun) -> float:
    """Return how long a started job has waited, in seconds: without the times in which it ran."""
    assert job_run.started_at is not None
    return max(job_run.started_at - job_run.job.submitted_at - job_run.ran_s, 0.0)


def waits_s(job_runs: Iterable[JobRun]) -> list[float]:
    """Return how long the started jobs have waited, ascending."""
    return sorted(wait_s(job_run) for job_run in job_runs if job_run.started_at is not None)


def completions_s(job_runs: Iterable[JobRun]) -> list[float]:
    """Return the times from submission to end of the jobs that ended."""
    return [
        job_run.ended_at - job_run.job.submitted_at for job_run in job_runs if job_run.ended_at is not None
    ]


def spans(job_run: JobRun, end: float) -> Iterator[tuple[Placement, float, float]]:
    """Yield each member of a job with its begin and end; `end` is that of a job that still runs."""
    for part in job_run.parts:
        for _, member in part.lease.ranked:
            yield member, part.lease.granted_at, part.ended_at
    if job_run.lease is None or job_run.started_at is None:
        return
    until = end if job_run.ended_at is None else job_run.ended_at
    for rank, member in job_run.lease.ranked:
        yield member, job_run.started_at, job_run.left_at.get(rank, until)


def over_time(record: Record) -> dict[str, float | None]:
    """Return means over time, from the first to the last event."""
    samples = record.samples
    total = _time_mean(samples, [sample.gpu_milli for sample in samples])
    nodes = _time_mean(samples, [sample.nodes for sample in samples])
    used = _time_mean(samples, [sample.used_milli for sample in samples])
    busy = _time_mean(samples, [sample.busy_nodes for sample in samples])
    lost = _time_mean(samples, [sample.fragmented_milli for sample in samples])
    free = _time_mean(samples, [sample.free_milli for sample in samples])
    queue = _time_mean(samples, [sample.pending for sample in samples])
    peak = max((s.used_milli / s.gpu_milli for s in samples if s.gpu_milli), default=0.0)
    return {
        "allocated_percent": _share(used, total),
        "peak_allocated_percent": _share(peak, 1.0) if total else None,
        "occupied_nodes_percent": _share(busy, nodes),
        "frag_ratio_percent": _share(lost, free),
        "mean_queue_length": _rounded(queue),
    }


BINS = 60
"""Parts of equal length into which the time of a replay is divided for figures."""

MAX_VALUES = 400
"""Values kept of a distribution for figures, besides its last."""

Use = tuple[str, float, float, float]
"""(node, GPU milli, begin, end): so much of the node was in use in that time, in seconds."""


def curve_data(record: Record, uses: Iterable[Use] | None = None) -> dict[str, Any]:
    """Return the data of a report's figures: means over bins, and some of waits, completions and fairness.

    `uses` of the servers are those of the leases unless they are given.
    """
    job_runs = record.job_runs.values()
    nodes, shares, start, end = busy_shares(record, uses=uses)
    at_s, used, total, pending = binned(record)
    return {
        "curve": {
            "at_s": at_s,
            "allocated_percent": [
                100 * part / max(whole, 1) for part, whole in zip(used, total, strict=True)
            ],
            "waiting": pending,
        },
        "waits_s": _some(waits_s(job_runs)),
        "jct_s": _some(sorted(completions_s(job_runs))),
        "ftf": _some(sorted(fairness(record).values())),
        "heat": {"nodes": nodes, "shares": shares, "end_s": end - start},
    }


def _some(values: list[float]) -> list[float]:
    step = max(math.ceil(len(values) / MAX_VALUES), 1)
    last = values[-1:] if (len(values) - 1) % step else []
    return values[::step] + last


def binned(record: Record) -> tuple[list[float], ...]:
    """Return the begins of the bins in seconds from the first, and means: used and total milli, pending."""
    import numpy as np

    samples = record.samples
    if not samples:
        return [], [], [], []
    at = np.array([sample.at for sample in samples]) - samples[0].at
    edges = np.linspace(0.0, max(at[-1], 1e-9), BINS + 1)

    def means(values: Sequence[float]) -> list[float]:
        area = np.concatenate(([0.0], np.cumsum(np.array(values[:-1]) * np.diff(at))))
        found: list[float] = (np.diff(np.interp(edges, at, area)) / np.diff(edges)).tolist()
        return found

    return (
        edges[:-1].tolist(),
        means([sample.used_milli for sample in samples]),
        means([sample.gpu_milli for sample in samples]),
        means([sample.pending for sample in samples]),
    )


def busy_shares(
    record: Record, bins: int = BINS, uses: Iterable[Use] | None = None
) -> tuple[list[str], list[list[float]], float, float]:
    """Return (node names, fraction of GPU milli in use by node and time bin, first and last second).

    `uses` are those of the leases unless they are given.
    """
    import numpy as np

    samples = record.samples
    start, end = (samples[0].at, samples[-1].at) if samples else (0.0, 0.0)
    gpus: dict[str, int] = {}
    for node in record.workload.nodes:  # the largest capacity that a node ever has
        gpus[node.name] = max(gpus.get(node.name, 1), len(node.gpus))
    nodes = {name: place for place, name in enumerate(gpus)}
    sizes = np.array(list(gpus.values())) * MILLI_PER_GPU
    width = max(end - start, 1e-9) / bins
    edges = start + width * np.arange(bins)
    used = np.zeros((len(nodes), bins))
    for name, milli, begin, until in _uses(record, end) if uses is None else uses:
        overlap = np.minimum(edges + width, until) - np.maximum(edges, begin)
        used[nodes[name]] += np.clip(overlap, 0, None) * milli
    shares = used / (width * sizes[:, None])
    return list(nodes), shares.tolist(), start, end


def _uses(record: Record, end: float) -> Iterator[Use]:
    for job_run in record.job_runs.values():
        milli = job_run.job.request.gpus * job_run.job.request.gpu_milli
        for member, begin, until in spans(job_run, end):
            yield member.node, milli, begin, until


def _time_mean(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Return the mean over time of a quantity that keeps each value until the next sample."""
    if len(samples) < 2:
        return values[0] if values else 0.0
    span = samples[-1].at - samples[0].at
    area = sum(
        value * (later.at - sample.at)
        for value, sample, later in zip(values[:-1], samples[:-1], samples[1:], strict=True)
    )
    return area / span


def _share(part: float, whole: float) -> float | None:
    return round(100 * part / whole, 2) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
