"""How good estimated runtimes are, on public traces and the sample history: `python benchmarks/estimates.py`.

    python benchmarks/estimates.py --data ../shared/data --json

Each run is estimated when it begins, from the runs that ended before. Only those that begin in the last part
of a trace count. Beside them stand the plain quantiles of the last 20 runs of the same class, team and shape,
else of all runs, and the median of the last 20 runs of the class. Plain quantiles hold fewer than four of
five: calibrated ones have both ends moved by the same steps as ours, so that widths are compared at one
coverage. The pinball loss is the mean over the quantiles 10, 50 and 90 %, in seconds, and in the logarithm,
where a few runs of weeks do not decide it.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.runtimes import KEPT_RUNTIMES, class_of
from resource_manager.scheduling.accounting.lives import lives_of
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.reasons.runtime_quantiles import (
    MISSED,
    Coverage,
    RuntimeModel,
    RuntimeQuantiles,
)
from simulator.cli import InputErrors, print_json
from simulator.io.rows import read_csv
from simulator.replay.replay import Replay
from simulator.replay.sample import sample_history
from simulator.replay.workload import EventBatch, Job, Workload, split
from simulator.rounds import pollux, shockwave
from simulator.rounds.leases import uniform_nodes

LEVELS = (MISSED, 0.5, 1 - MISSED)
LARGE_GROUP = 200
"""Estimates of a team or size from which its coverage is told."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a job, in seconds."""

    request: Request
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return max(self.ended_at - self.started_at, 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run with what was estimated at its begin: by the model, plain quantiles, these calibrated, median."""

    run: Run
    model: tuple[float, ...] | None
    plain: tuple[float, ...] | None
    calibrated: tuple[float, ...] | None
    median: float | None


class Plain:
    """The quantiles of the last runs of the same class, team and shape, else of all."""

    def __init__(self) -> None:
        self._runs: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_RUNTIMES))
        self._coverage = Coverage()

    def estimate(self, request: Request) -> tuple[float, ...] | None:
        runs = sorted(self._runs[self._key(request)] or self._runs[""])
        return tuple(_quantile(runs, level) for level in LEVELS) if runs else None

    def calibrated(self, quantiles: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """Return the quantiles with both ends moved so that nine of ten outcomes are on their inner side."""
        if quantiles is None:
            return None
        low, median, high = quantiles
        below, above = math.exp(-self._coverage.below), math.exp(self._coverage.above)
        return min(low * below, median), median, max(high * above, median)

    def median(self, request: Request) -> float | None:
        runs = self._runs[class_of(request)]
        return statistics.median(runs) if runs else None

    def learn(self, request: Request, seconds: float, given: tuple[float, ...] | None) -> None:
        """Learn from a run, and from the calibrated quantiles that were given when it began."""
        if given is not None:
            self._coverage.note(seconds, given[0], given[-1])
        for key in ("", class_of(request), self._key(request)):
            self._runs[key].append(seconds)

    def _key(self, request: Request) -> object:
        return class_of(request), request.team, request.shape


def _quantile(ordered: Sequence[float], level: float) -> float:
    place = level * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - int(place))


def estimates(runs: Iterable[Run]) -> Iterator[Estimate]:
    """Yield the estimate of each run, in order of their begins."""
    model, plain = RuntimeModel(), Plain()
    going: list[tuple[float, int, Run, RuntimeQuantiles | None, tuple[float, ...] | None]] = []
    for number, run in enumerate(sorted(runs, key=lambda run: run.started_at)):
        while going and going[0][0] <= run.started_at:
            _, _, over, given, widened = heapq.heappop(going)
            model.learn(over.request, over.seconds, given)
            plain.learn(over.request, over.seconds, widened)
        found, raw = model.estimate(run.request), plain.estimate(run.request)
        calibrated = plain.calibrated(raw)
        heapq.heappush(going, (run.ended_at, number, run, found, calibrated))
        quantiles = None if found is None else tuple(found.at(level) for level in LEVELS)
        yield Estimate(run, quantiles, raw, calibrated, plain.median(run.request))


def score(found: Sequence[Estimate]) -> dict[str, Any]:
    """Return the figures of estimates: coverage in percent, losses and width in parts of the plain ones."""
    known = [(each, each.model, each.plain) for each in found if each.model and each.plain]
    groups: dict[str, list[bool]] = defaultdict(list)
    for each, model, _ in known:
        request = each.run.request
        for name in (f"team {request.team}", f"{request.gpus * request.nodes} GPUs"):
            groups[name].append(_is_inside(model, each.run.seconds))
    medians = [
        (abs(each.run.seconds - model[1]), abs(each.run.seconds - each.median))
        for each, model, _ in known
        if each.median is not None
    ]
    calibrated = [(each.calibrated, each.run.seconds) for each, _, _ in known if each.calibrated]
    width_s = statistics.median(model[2] - model[0] for _, model, _ in known)
    loss_s = statistics.fmean(_loss(model, each.run.seconds) for each, model, _ in known)
    plain_loss_s = statistics.fmean(_loss(plain, each.run.seconds) for each, _, plain in known)
    by_group = {name: _percent(inside) for name, inside in groups.items() if len(inside) >= LARGE_GROUP}
    return {
        "estimates": len(found),
        "unknown_percent": 100 * (1 - len(known) / len(found)),
        "coverage_percent": _percent([_is_inside(model, each.run.seconds) for each, model, _ in known]),
        "plain_coverage_percent": _percent([_is_inside(plain, each.run.seconds) for each, _, plain in known]),
        "group_lowest_percent": min(by_group.values(), default=None),
        "group_highest_percent": max(by_group.values(), default=None),
        "coverage_by_group": by_group,
        "loss_s": loss_s,
        "plain_loss_s": plain_loss_s,
        "of_plain_loss": _part(loss_s, plain_loss_s),
        "of_plain_log_loss": _part(
            statistics.fmean(_log_loss(model, each.run.seconds) for each, model, _ in known),
            statistics.fmean(_log_loss(plain, each.run.seconds) for each, _, plain in known),
        ),
        "of_plain_width": _part(width_s, statistics.median(plain[2] - plain[0] for _, _, plain in known)),
        "calibrated_coverage_percent": _percent([_is_inside(each, seconds) for each, seconds in calibrated]),
        "of_calibrated_loss": _part(
            loss_s, statistics.fmean(_loss(each, seconds) for each, seconds in calibrated)
        ),
        "of_calibrated_width": _part(width_s, statistics.median(each[2] - each[0] for each, _ in calibrated)),
        "of_median_error": _part(sum(ours for ours, _ in medians), sum(other for _, other in medians)),
    }


def _is_inside(quantiles: Sequence[float], value: float) -> bool:
    return quantiles[0] <= value <= quantiles[-1]


def _part(ours: float, other: float) -> float | None:
    return ours / other if other > 0 else None


def _percent(inside: Sequence[bool]) -> float:
    return 100 * sum(inside) / len(inside)


def _loss(quantiles: Sequence[float], value: float) -> float:
    return statistics.fmean(
        max(level * (value - quantile), (level - 1) * (value - quantile))
        for level, quantile in zip(LEVELS, quantiles, strict=True)
    )


def _log_loss(quantiles: Sequence[float], value: float) -> float:
    return _loss([math.log(max(each, 1e-9)) for each in quantiles], math.log(value))


# ---- the traces ----


def openb_runs(folder: Path) -> list[Run]:
    """Return the runs of openb's pods; a team is their quality of service."""
    runs = []
    for row in read_csv(folder / "csv" / "openb_pod_list_default.csv", ("scheduled_time", "deletion_time")):
        if not row.text("scheduled_time") or row.number("deletion_time") <= row.number("scheduled_time"):
            continue
        gpus = row.whole("num_gpu")
        amounts = {name: row.whole(name) for name in ("cpu_milli", "memory_mib")}
        milli = row.whole("gpu_milli") if gpus else 1000
        types = tuple(filter(None, row.text("gpu_spec").split("|")))
        request = Request(row.text("name"), gpus, milli, amounts, types, team=row.text("qos"))
        runs.append(Run(request, row.number("scheduled_time"), row.number("deletion_time")))
    return runs


def played(jobs: Sequence[Job], servers: int, gpus: int) -> list[Run]:
    """Return the runs of jobs that our queue places on equal servers."""
    cluster = ClusterState(uniform_nodes(servers, gpus))
    jobs = sorted(split(jobs, cluster), key=lambda job: job.submitted_at)
    batches = tuple(EventBatch(job.submitted_at, arrivals=[job]) for job in jobs)
    replay = Replay(Workload("", cluster.snapshot(), batches), first_fit, get_order("priority"))
    return [
        Run(run.job.request, run.started_at, run.ended_at)
        for run in replay.run().job_runs.values()
        if run.started_at is not None and run.ended_at is not None
    ]


def _labelled(name: str, gpus: int, dag: str, task: str) -> Request:
    return Request(name, gpus, labels={"dag_id": dag, "task_id": task})


def pollux_jobs(folder: Path) -> list[Job]:
    """Return the jobs of the four workloads of full load, one after the other: a task is an application."""
    jobs: list[Job] = []
    begin = 0.0
    for workload in "1234":
        for job in pollux.read_jobs(folder, "1.0", workload):
            request = _labelled(f"{workload}/{job.name}", int(job.gpus), "pollux", job.application.name)
            jobs.append(Job(request, begin + job.arrival_s, job.exclusive_s))
        begin = jobs[-1].submitted_at + 3600
    return jobs


def shockwave_jobs(folder: Path) -> list[Job]:
    """Return the jobs of the trace: a task is a model."""
    return [
        Job(_labelled(job.name, int(job.gpus), "shockwave", job.model), job.arrival_s, job.exclusive_s)
        for job in shockwave.read_jobs(folder)
    ]


def pollux_runs(folder: Path) -> list[Run]:
    return played(pollux_jobs(folder), pollux.SERVERS, pollux.GPUS_PER_SERVER)


def shockwave_runs(folder: Path) -> list[Run]:
    return played(shockwave_jobs(folder), shockwave.SERVERS, shockwave.GPUS_PER_SERVER)


def sample_runs() -> list[Run]:
    """Return the runs of the sample history, most of which state a runtime."""
    history = sample_history()
    lives = lives_of(history.before, history.changes).lives.values()
    return [
        Run(life.granted.request, life.granted.granted_at, life.ended_at) for life in lives if life.is_over
    ]


TRACES = {"openb": openb_runs, "pollux": pollux_runs, "shockwave": shockwave_runs}


def show(figures: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Print figures by trace."""
    if as_json:
        print_json(figures)
        return
    for name, values in figures.items():
        click.echo(name)
        for key, value in values.items():
            click.echo(f"  {key:<26}{value if not isinstance(value, float) else round(value, 3)}")


@click.command(cls=InputErrors)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the traces; else the sample alone.")
@click.option("--first", default=0.5, show_default=True, help="Part of a trace that is only learnt from.")
@click.option("--json", "as_json", is_flag=True)
def main(data: Path | None, first: float, as_json: bool) -> None:
    """Print the figures of each trace."""
    traces = {"sample": sample_runs()}
    if data is not None:
        traces |= {name: read(data / name) for name, read in TRACES.items()}
    figures = {}
    for name, runs in traces.items():
        found = list(estimates(runs))
        figures[name] = score(found[int(first * len(found)) :])
    show(figures, as_json)


if __name__ == "__main__":
    main()
