"""Figures of a round-based replay, in the form of any other replay's."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from resource_manager.core.models import MILLI_PER_GPU, Lease, Request
from simulator.present.figures import Bar
from simulator.progress import Progress, no_progress
from simulator.replay import metrics
from simulator.replay.cluster_samples import Sample
from simulator.replay.job_runs import JobRun, Record
from simulator.replay.workload import Job as Arrival
from simulator.replay.workload import Part, Workload
from simulator.rounds.job import Job
from simulator.rounds.leases import Leases


class Rounds(Protocol):
    """A replay in rounds, whatever their length."""

    leases: Leases
    rounds: int

    @property
    def jobs(self) -> Sequence[Job]:
        """The jobs, with what happened to them after the run."""

    def run(self, progress: Progress = no_progress) -> None:
        """Run the jobs to their ends."""


def study_summary(rounds: Rounds) -> dict[str, Any]:
    """Return the figures of a published study, and those of each job; times in seconds."""
    import numpy as np

    jct_s = {job.name: job.jct_s for job in rounds.jobs}
    record = record_of(rounds)
    return {
        "jobs": len(rounds.jobs),
        "makespan_s": max(job.ended_at or 0 for job in rounds.jobs)
        - min(job.arrival_s for job in rounds.jobs),
        "mean_jct_s": float(np.mean(list(jct_s.values()))),
        **metrics.fairness_figures(record),
        **figures(rounds),
        "allocated_percent": metrics.over_time(record)["allocated_percent"],
        "jct_s": jct_s,
        "ftf": metrics.fairness(record),
    }


def figures(rounds: Rounds) -> dict[str, Any]:
    """Return what only a replay in rounds has."""
    return {
        "rounds": rounds.rounds,
        "preemptions": sum(job.preemptions for job in rounds.jobs),
        "lost_gpu_s": sum(job.lost_gpu_s for job in rounds.jobs),
    }


def record_of(rounds: Rounds) -> Record:
    """Return the record: what is sampled are GPUs and servers, those in use, and jobs without GPUs."""
    leases = rounds.leases
    start = replace(leases.cluster.snapshot(), nodes=tuple(leases.nodes))
    record = Record(Workload("rounds", start, ()))
    for job in rounds.jobs:
        record.job_runs[job.name] = _run_of(job)
    times = [size.at for size in leases.sizes]
    steps = sorted(_steps(rounds.jobs), key=lambda step: step.at)
    steps += [_Step(at, 0) for at in times if steps and steps[0].at < at < steps[-1].at]
    busy: Counter[str] = Counter()
    used, pending = 0.0, 0
    for step in sorted(steps, key=lambda step: step.at):
        used += step.sign * step.gpus
        pending += step.waiting
        for server in set(step.servers):
            busy[server] += step.sign
        busy_nodes = sum(count > 0 for count in busy.values())
        taken, size = round(MILLI_PER_GPU * used), leases.sizes[bisect_right(times, step.at) - 1]
        of = (size.gpu_milli, size.servers, size.gpu_milli - taken)
        sample = Sample(step.at, taken, busy_nodes, pending, 0.0, *of)
        if record.samples and record.samples[-1].at == step.at:
            record.samples[-1] = sample
        else:
            record.samples.append(sample)
    return record


def _run_of(job: Job) -> JobRun:
    """Return what happened to a job: each time on GPUs was a lease, after the last of which it may wait."""
    request, spans = Request(job.name), [*job.spans]
    has_left = job.ended_at is not None or (spans and spans[-1].end == job.cancelled_at)
    last = spans.pop() if spans and (has_left or job.servers) else None
    return JobRun(
        Arrival(request, job.arrival_s, job.exclusive_s or 0.0),
        None if last is None else last.begin,
        job.ended_at,
        cancelled=job.cancelled_at is not None and not job.spans,
        parts=[Part(Lease(request, (), 0, span.begin), ended_at=span.end) for span in spans],
    )


class _Step(NamedTuple):
    """A job takes (sign 1) or leaves (-1) GPUs; so many jobs more are waiting."""

    at: float
    waiting: int
    sign: int = 0
    gpus: float = 0.0
    servers: tuple[str, ...] = ()


def _steps(jobs: Sequence[Job]) -> Iterator[_Step]:
    for job in jobs:
        yield _Step(job.arrival_s, 1)
        for span in job.spans:
            yield _Step(span.begin, -1, 1, span.gpus, span.servers)
            yield _Step(span.end, 1, -1, span.gpus, span.servers)
        left_at = job.cancelled_at if job.ended_at is None else job.ended_at
        if left_at is not None:
            yield _Step(left_at, -1)


def summarise(rounds: Rounds) -> dict[str, Any]:
    """Return the figures of a replay of any workload, and those that only rounds have."""
    record = record_of(rounds)
    found = {**metrics.summarise(record), **figures(rounds)}
    for key in ("frag_ratio_percent", "stated_runtimes", "waits_of"):  # not measured, not used, not by size
        found.pop(key)
    return found


def curves(rounds: Rounds) -> dict[str, Any]:
    """Return the data of a report's figures."""
    uses = (
        (server, MILLI_PER_GPU * span.gpus * count / len(span.servers), span.begin, span.end)
        for job in rounds.jobs
        for span in job.spans
        for server, count in Counter(span.servers).items()
    )
    return metrics.curve_data(record_of(rounds), uses)


def bars_of(rounds: Rounds) -> list[Bar]:
    """Return a bar for each time that a job had GPUs of a server."""
    return [
        Bar(server, span.begin, span.end, job.name)
        for job in rounds.jobs
        for span in job.spans
        for server in dict.fromkeys(span.servers)
    ]


JOB_COLUMNS = (
    "job", "gpus", "arrived_s", "started_s", "ended_s", "jct_s", "preemptions", "placements", "lost_gpu_s",
)  # fmt: skip


def job_rows(rounds: Rounds) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each job, in the order of `JOB_COLUMNS`."""
    for job in rounds.jobs:
        times = (job.arrival_s, job.started_at, job.ended_at, job.jct_s)
        yield job.name, job.gpus, *times, job.preemptions, len(job.spans), job.lost_gpu_s
