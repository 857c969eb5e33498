"""The trace of Shockwave (Zheng et al., NSDI 2023): jobs whose batch size changes while they train."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from resource_manager.manager.plurals import counted
from simulator.errors import InputError
from simulator.io.rows import MAX_VALUE, Row, read_json, read_json_items
from simulator.rounds.job import Job

SERVERS = 32
GPUS_PER_SERVER = 1
MODES = ("static", "accordion", "gns")
MAX_BATCH_SIZE = {
    "ResNet-18": 256, "ResNet-50": 128, "Transformer": 128, "LM": 80, "Recommendation": 8192,
}  # fmt: skip

RECOMMENDATION_CRITICAL = {512: 30, 1024: 30, 2048: 40, 4096: 10, 8192: 10}
"""First batch size -> epochs for which Accordion keeps it."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Steps a second by model, batch size and GPUs; samples of an epoch by model; batch sizes by noise."""

    steps_per_s: Mapping[str, Mapping[int, Mapping[int, float]]]
    dataset_size: Mapping[str, int]
    by_noise: Mapping[tuple[str, int, int], tuple[tuple[int, ...], tuple[int, ...]]]
    """(model, first batch size, GPUs) -> (epochs from which a batch size is allowed, batch sizes)."""


@dataclass(slots=True, eq=False)
class ShockwaveJob(Job):
    """A job of the study; `total` and `run` are steps to do and done, both at the batch size of now."""

    model: str = field(kw_only=True)
    batch_size: int = field(kw_only=True)
    mode: str = field(kw_only=True)
    total: int = field(kw_only=True)
    exclusive_s: float = field(kw_only=True)
    tables: Tables = field(kw_only=True)
    first_batch_size: int = field(init=False)
    run: int = 0
    pending_batch_size: int | None = None

    def __post_init__(self) -> None:
        self.first_batch_size = self.batch_size

    @property
    def steps_left(self) -> float:
        return self.total - self.run

    @property
    def rate(self) -> float:
        return self._rates[int(self.gpus)]

    @property
    def _rates(self) -> Mapping[int, float]:
        return self.tables.steps_per_s[self.model][self.batch_size]

    @property
    def max_gpus(self) -> int:
        return max(self._rates)

    def step_s(self, gpus: int) -> float:
        return 1.0 / self.rate_on(gpus)

    def rate_on(self, gpus: int) -> float:
        """Return the steps a second on that many GPUs, linear between the numbers in the table."""
        rates = self._rates
        if gpus in rates:
            return rates[gpus]
        low = max(count for count in rates if count < gpus)
        high = min(count for count in rates if count > gpus)
        return rates[low] + (rates[high] - rates[low]) * (gpus - low) / (high - low)

    def epoch_steps(self, batch_size: int) -> int:
        """Return the steps of one epoch at a batch size."""
        return ceil(self.tables.dataset_size[self.model] / batch_size)

    def decide(self) -> None:
        """Note a batch size to change to, if the epoch reached calls for it."""
        if self.mode == "static":
            return
        epoch = ceil(self.run / self.epoch_steps(self.batch_size))
        new = self._by_noise(epoch) if self.mode == "gns" else self._accordion(epoch)
        if new is not None:
            self.pending_batch_size = new

    def _by_noise(self, epoch: int) -> int | None:
        largest = max(self._allowed(epoch), self._allowed(epoch + 1))
        if largest > self.batch_size and self.batch_size != MAX_BATCH_SIZE[self.model]:
            return 2 * self.batch_size
        return None

    def _allowed(self, epoch: int) -> int:
        key = (self.model, self.first_batch_size, int(self.gpus))
        epochs, sizes = self.tables.by_noise.get(key, ((), ()))
        place = bisect_right(epochs, epoch)
        return sizes[place - 1] if place else self.first_batch_size

    def _accordion(self, epoch: int) -> int | None:
        largest = MAX_BATCH_SIZE[self.model]
        if self.model == "Transformer" or self.first_batch_size == largest:
            return None
        critical = is_critical(self.model, self.first_batch_size, epoch)
        if self.batch_size == self.first_batch_size:
            return None if critical or self.batch_size == largest else largest
        return self.first_batch_size if critical else None

    def adapt(self) -> None:
        """Change to the batch size noted: the number of epochs stays, steps are counted again."""
        new, self.pending_batch_size = self.pending_batch_size, None
        if new is None or int(self.gpus) not in self.tables.steps_per_s[self.model].get(new, {}):
            return
        old_steps, new_steps = self.epoch_steps(self.batch_size), self.epoch_steps(new)
        epochs = ceil(self.total / old_steps)
        total = ceil(self.total * self.batch_size / new)
        if ceil(total / new_steps) != epochs:
            total = epochs * new_steps
        self.run = ceil(self.run / old_steps) * new_steps
        self.total = total
        self.batch_size = new


def is_critical(model: str, first_batch_size: int, epoch: int) -> bool:
    """Return True in the epochs for which Accordion keeps the first batch size."""
    if model == "LM":
        return epoch < 10
    if model == "ResNet-50":
        return epoch % 30 < 10
    if model == "ResNet-18":
        return epoch < (20 if first_batch_size == 256 else 10) or 150 <= epoch < 160 or 250 <= epoch < 260
    return epoch < RECOMMENDATION_CRITICAL[first_batch_size]


def read_jobs(folder: Path) -> list[ShockwaveJob]:
    """Return the jobs in order of arrival; raise `InputError` with file, place in the list and reason."""
    tables = read_tables(folder)
    path = folder / "jobs.json"
    rows = read_json_items(path)
    if not rows:
        raise InputError("the trace lists no job", path=path)
    jobs: dict[str, ShockwaveJob] = {}
    latest_s = 0.0
    for row in rows:
        job = _job(row, tables)
        if job.name in jobs:
            raise row.fail(f"job {job.name} appears twice")
        if job.arrival_s < latest_s:
            raise row.fail(f"arrival_s is {job.arrival_s}, before that of the job above it")
        latest_s = job.arrival_s
        jobs[job.name] = job
    return list(jobs.values())


def _job(row: Row, tables: Tables) -> ShockwaveJob:
    model, mode = row.text("model"), row.text("mode")
    gpus, size = row.whole("gpus", most=SERVERS * GPUS_PER_SERVER), row.whole("batch_size")
    if model not in MAX_BATCH_SIZE or model not in tables.steps_per_s:
        raise row.fail(f"unknown model {model!r}; known are {', '.join(MAX_BATCH_SIZE)}")
    if mode not in MODES:
        raise row.fail(f"mode is {mode!r}, not one of {', '.join(MODES)}")
    if gpus not in tables.steps_per_s[model].get(size, {}):
        where = f"{model} at batch size {size} on {counted(gpus, 'GPU')}"
        raise row.fail(f"throughputs.json has no rate of {where}")
    if mode == "accordion" and model == "Recommendation" and size not in RECOMMENDATION_CRITICAL:
        raise row.fail(f"accordion knows no Recommendation at batch size {size}")
    if not row.whole("steps") or not row.number("exclusive_s"):
        raise row.fail("steps and exclusive_s must be above 0")
    return ShockwaveJob(
        str(row.whole("job")),
        row.number("arrival_s"),
        gpus,
        model=model,
        batch_size=size,
        mode=mode,
        total=row.whole("steps"),
        exclusive_s=row.number("exclusive_s"),
        tables=tables,
    )


def read_tables(folder: Path) -> Tables:
    """Return the throughputs and the batch sizes by gradient noise; raise `InputError`."""
    path = folder / "throughputs.json"
    values = read_json(path)
    try:
        rates = {
            (model, int(size), int(gpus)): float(rate)
            for model, sizes in values["steps_per_s"].items()
            for size, counts in sizes.items()
            for gpus, rate in counts.items()
        }
        samples = {model: int(number) for model, number in values["dataset_size"].items()}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(
            "not steps_per_s by model, batch size and GPUs with dataset_size", path=path
        ) from error
    steps_per_s: dict[str, dict[int, dict[int, float]]] = {}
    for (model, size, gpus), rate in rates.items():
        if not (0 <= rate < MAX_VALUE and size > 0 and gpus > 0 and samples.get(model, 0) > 0):
            raise InputError(f"{model}, batch size {size}, {counted(gpus, 'GPU')}: rate is {rate}", path=path)
        if rate:  # 0 where nothing was measured
            steps_per_s.setdefault(model, {}).setdefault(size, {})[gpus] = rate
    return Tables(steps_per_s, samples, _read_by_noise(folder / "gns.json"))


def _read_by_noise(path: Path) -> dict[tuple[str, int, int], tuple[tuple[int, ...], tuple[int, ...]]]:
    values = read_json(path)
    try:
        return {
            (model, int(first), int(gpus)): (
                tuple(int(epoch) for epoch, _ in rows),
                tuple(int(size) for _, size in rows),
            )
            for model, firsts in values.items()
            for first, counts in firsts.items()
            for gpus, rows in counts.items()
        }
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError("not [epoch, batch size] by model, first batch size and GPUs", path=path) from error
