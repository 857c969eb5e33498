"""The workloads of Pollux (Qiao et al., OSDI 2021): jobs with known statistics of every epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from typing import Any

from resource_manager.manager.plurals import counted
from simulator.errors import InputError
from simulator.io.rows import Row, read_csv, read_json
from simulator.rounds.fixed_rounds import RESTART_S
from simulator.rounds.job import RunningJob
from simulator.rounds.step_times import Measured, StepTime, StepTimes

SERVERS = 16
GPUS_PER_SERVER = 4
WORKLOAD_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
LIMITS = ("epochs", "init_batch_size", "max_batch_size", "min_local_bsz", "max_local_bsz")
ONE_GPU = ("ncf",)
"""Applications that Optimus keeps on one GPU."""

EPSILON = 1e-8
FOREVER_S = 10**9
MAX_STATISTIC = 1e100
"""Largest gradient statistic: sums and products stay finite."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Statistics of one epoch by total batch size, in ascending order."""

    batch_sizes: tuple[int, ...]
    iteration: tuple[float, ...]
    grad_sqr: tuple[float, ...]
    grad_var: tuple[float, ...]

    def at(self, values: Sequence[float], batch_size: float) -> float:
        """Return one of the statistics at a batch size, linear between neighbouring sizes."""
        sizes = self.batch_sizes
        if not sizes[0] <= batch_size <= sizes[-1]:
            raise InputError(
                f"a total batch size of {batch_size:g} is outside the tables, {sizes[0]} to {sizes[-1]}"
            )
        place = bisect_left(sizes, batch_size)
        if place < len(sizes) and sizes[place] == batch_size:
            return values[place]
        low, high = sizes[place - 1], sizes[place]
        return ((batch_size - low) * values[place] + (high - batch_size) * values[place - 1]) / (high - low)


@dataclass(frozen=True, eq=False)
class Application:
    """An application: its limits, epochs, the progress at the end of each, and step times."""

    name: str
    epochs: int
    init_batch_size: int
    max_batch_size: int
    min_local_bsz: int
    max_local_bsz: int
    statistics: tuple[Epoch, ...]
    progress: tuple[float, ...]
    times: StepTimes

    def local_batch(self, batch_size: int, gpus: int, least_steps: int = 0) -> tuple[int, int]:
        """Return (samples for each GPU, extra accumulation steps) for a total batch size."""
        local = ceil(batch_size / gpus - EPSILON)
        extra = max(ceil(local / self.max_local_bsz - EPSILON) - 1, least_steps)
        if gpus == 1 and batch_size > self.init_batch_size:
            extra = max(1, extra)
        size = min(ceil(local / (extra + 1) - EPSILON), floor(self.max_batch_size / (gpus * (extra + 1))))
        return size, extra

    def step(self, batch_size: int, placement: tuple[int, ...], least_steps: int = 0) -> tuple[float, int]:
        """Return (seconds of a step with its accumulation, batch size really run) on GPUs by server."""
        gpus = sum(placement)
        size, extra = self.local_batch(batch_size, gpus, least_steps)
        step_s, sync_s = self.times.of(placement, size)
        if step_s != step_s:
            raise InputError(
                f"{self.name}: no step time was measured near {counted(size, 'sample')} a GPU "
                f"on {counted(gpus, 'GPU')}"
            )
        return step_s + (step_s - sync_s) * extra, gpus * size * (extra + 1)

    @cache  # noqa: B019
    def rate(self, batch_size: int, placement: tuple[int, ...], epoch: int) -> float:
        """Return the progress a second in an epoch."""
        step_s, total = self.step(batch_size, placement)
        statistics = self.statistics[epoch]
        sqr = statistics.at(statistics.grad_sqr, total)
        var = statistics.at(statistics.grad_var, total)
        gain = (var + sqr) / (var / (total / self.init_batch_size) + sqr)
        return gain / step_s

    @cache  # noqa: B019
    def full_step_s(self, batch_size: int, gpus: int) -> float:
        """Return the seconds of a step on `full_servers`; one GPU accumulates at least once."""
        return self.step(batch_size, full_servers(gpus), least_steps=1 if gpus == 1 else 0)[0]

    def iteration(self, batch_size: int, epoch: int) -> float:
        """Return the steps done at the end of an epoch."""
        statistics = self.statistics[epoch]
        return statistics.at(statistics.iteration, batch_size)


def full_servers(gpus: int) -> tuple[int, ...]:
    """Return the GPUs on each server if all but the last are full."""
    rest = gpus % GPUS_PER_SERVER
    return (GPUS_PER_SERVER,) * (gpus // GPUS_PER_SERVER) + ((rest,) if rest else ())


@dataclass(slots=True, eq=False)
class PolluxJob(RunningJob):
    """A job of the study; progress is counted in steps at the smallest batch size."""

    application: Application = field(kw_only=True)
    batch_size: int = field(kw_only=True)
    epoch: int = 0
    progress: float = 0.0

    @property
    def steps_left(self) -> float:
        last = self.application.epochs - 1
        if self.epoch >= last:
            return 1.0
        iteration = self.application.iteration
        return iteration(self.batch_size, last) - iteration(self.batch_size, self.epoch)

    @property
    def rate(self) -> float:
        return 1.0 / self.step_s(int(self.gpus))

    @property
    def max_gpus(self) -> int:
        return 1 if self.application.name in ONE_GPU else self.batch_size // self.application.min_local_bsz

    def step_s(self, gpus: int) -> float:
        return self.application.full_step_s(self.batch_size, gpus)

    @property
    def exclusive_s(self) -> float:
        servers = full_servers(int(self.gpus))
        placement = tuple(str(server) for server, gpus in enumerate(servers) for _ in range(gpus))
        alone = PolluxJob(
            self.name, 0, self.gpus, placement, application=self.application, batch_size=self.batch_size
        )
        return RESTART_S + (alone.advance(FOREVER_S) or 0)

    def advance(self, seconds: int) -> int | None:
        left, placement, application = seconds, tuple(Counter(self.servers).values()), self.application
        while left > 0:
            rate = application.rate(self.batch_size, placement, self.epoch)
            end = application.progress[self.epoch]
            if self.progress + rate * left < end:
                self.progress += rate * left
                return None
            left -= round((end - self.progress) / rate)
            self.progress = end
            self.epoch += 1
            if self.epoch == application.epochs:
                return seconds - left
        return None


def read_jobs(folder: Path, load: str, workload: str) -> list[PolluxJob]:
    """Return the jobs of one workload, in file order; raise `InputError` with file, line and reason."""
    path = folder / "workloads" / load / f"workload-{workload}.csv"
    if not path.is_file():
        raise InputError(
            f"no such workload: {path.parent.parent} has {_loads_and_workloads(folder / 'workloads')}",
            path=path,
        )
    limits = read_json(folder / "applications.json")
    if not isinstance(limits, dict):
        raise InputError("not an object of applications", path=folder / "applications.json")
    applications: dict[str, Application] = {}
    jobs: dict[str, PolluxJob] = {}
    for row in read_csv(path, WORKLOAD_COLUMNS):
        name = row.text("application")
        if name not in limits:
            raise row.fail(f"unknown application {name!r}; known are {', '.join(limits)}")
        if name not in applications:
            applications[name] = _application(folder, name, limits[name])
        job = _job(row, applications[name])
        if not job.name or job.name in jobs:
            raise row.fail(f"the name {job.name!r} is empty or used twice")
        jobs[job.name] = job
    if not jobs:
        raise InputError("the workload lists no job", path=path)
    return list(jobs.values())


def _loads_and_workloads(folder: Path) -> str:
    found = sorted(
        f"--load {path.parent.name} --workload {path.stem.removeprefix('workload-')}"
        for path in folder.glob("*/workload-*.csv")
    )
    return ", ".join(found) or "none"


def _job(row: Row, application: Application) -> PolluxJob:
    gpus = row.whole("num_replicas", most=SERVERS * GPUS_PER_SERVER)
    batch_size = row.whole("batch_size")
    if not gpus:
        raise row.fail("num_replicas must be above 0")
    if not application.init_batch_size <= batch_size <= application.max_batch_size:
        raise row.fail(
            f"batch_size is {batch_size}, not from {application.init_batch_size} to "
            f"{application.max_batch_size} as for {application.name}"
        )
    return PolluxJob(
        row.text("name"), row.whole("time"), gpus, application=application, batch_size=batch_size
    )


def _application(folder: Path, name: str, limits: Any) -> Application:
    values: dict[str, Any] = {key: limits.get(key) if isinstance(limits, dict) else None for key in LIMITS}
    for key, value in values.items():
        if type(value) is not int or value < 1:
            reason = f"{name}: {key} is {value!r}, not a whole number above 0"
            raise InputError(reason, path=folder / "applications.json")
    tables = folder / "applications" / name
    progress, statistics = _epochs(tables, values["epochs"])
    times = StepTimes(_placements(tables / "placements.csv"), _scalability(tables / "scalability.csv"))
    return Application(name, **values, statistics=statistics, progress=progress, times=times)


def _placements(path: Path) -> list[tuple[tuple[int, ...], int, StepTime]]:
    found = []
    for row in read_csv(path, ("placement", "local_bsz", "step_time", "sync_time")):
        digits = row.text("placement")
        if not digits.isdecimal() or "0" in digits:
            raise row.fail(f"placement is {digits!r}, not the numbers of GPUs by server as digits")
        found.append((tuple(map(int, digits)), row.whole("local_bsz"), _time(row)))
    return found


def _scalability(path: Path) -> list[Measured]:
    columns = ("num_nodes", "num_replicas", "local_bsz")
    return [
        Measured(row.whole("num_nodes"), row.whole("num_replicas"), row.whole("local_bsz"), _time(row))
        for row in read_csv(path, (*columns, "step_time", "sync_time"))
    ]


def _time(row: Row) -> StepTime:
    time = StepTime(row.number("step_time"), row.number("sync_time"))
    if not 0 < time.step_s >= time.sync_s:
        raise row.fail(f"step_time is {time.step_s} and sync_time {time.sync_s}, not a part of it")
    return time


def _epochs(folder: Path, epochs: int) -> tuple[tuple[float, ...], tuple[Epoch, ...]]:
    """Return the progress at the end of each epoch, and its statistics by batch size."""
    columns = ("progress", "iteration", "grad_sqr", "grad_var")
    tables: dict[int, list[tuple[float, ...]]] = {}
    for path in folder.glob("validation-*.csv"):
        size = path.stem.removeprefix("validation-")
        if not size.isdecimal():
            raise InputError("the name lacks its batch size", path=path)
        tables[int(size)] = rows = [
            tuple(row.number(column, most=MAX_STATISTIC) for column in columns)
            for row in read_csv(path, columns)
        ]
        if any(sqr + var == 0 for _, _, sqr, var in rows):
            raise InputError("grad_sqr and grad_var are both 0 in an epoch", path=path)
        if any(later[0] < row[0] for row, later in pairwise(rows)):
            raise InputError("progress falls from one epoch to the next", path=path)
        if len(rows) < epochs:
            raise InputError(f"{len(rows)} epochs, fewer than the {epochs} to run", path=path)
    if not tables:
        raise InputError("holds no validation-*.csv", path=folder)
    sizes = tuple(sorted(tables))
    by_epoch = [[tables[size][epoch] for size in sizes] for epoch in range(epochs)]
    statistics = tuple(Epoch(sizes, *list(zip(*rows, strict=True))[1:]) for rows in by_epoch)
    return tuple(min(row[0] for row in rows) for rows in by_epoch), statistics
