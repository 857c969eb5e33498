"""Seeded random instances with the ranges of the paper's evaluation (Bao et al., INFOCOM 2018, section V)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from simulator.errors import InputError
from simulator.oasis.model import MAX_COUNT, ROUNDING, Amounts, Instance, TrainingJob

GPU_SERVERS: tuple[Amounts, ...] = (
    (8, 64, 488, 1024, 25),
    (16, 64, 732, 1024, 25),
    (4, 32, 244, 512, 10),
)
"""Capacities of worker servers; a homogeneous cluster has the first type only, a mixed one alternates."""

CPU_SERVERS: tuple[Amounts, ...] = ((0, 72, 144, 512, 25), (0, 36, 72, 512, 20))
"""Capacities of PS servers, likewise."""

MAX_WAIT_SHARE = 0.5
"""A job is drawn again if its shortest duration is over this fraction of the slots."""

TYPICAL_SHARE = 0.1
"""A slot's length is chosen so that the median job could finish within this fraction of the slots."""

HISTORY_STREAM = 1
TRAINING_STREAM = 2
"""Extra words of a seed, so that a history or a training set shares no draw with an instance."""


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """Size and load of the instances to draw."""

    jobs: int
    slots: int
    servers: int
    mixed: bool
    load: float | None

    def draw(self, seed: int, axis: str = "", value: float = 0.0) -> Instance:
        """Return the instance of that seed, with `jobs`, `load` or `servers` (under the same jobs) varied."""
        jobs = int(value) if axis == "jobs" else self.jobs
        load = value if axis == "load" else self.load
        drawn = draw_instance(seed, jobs, self.slots, self.servers, load=load, mixed=self.mixed)
        return with_servers(drawn, int(value), self.mixed) if axis == "servers" else drawn


def draw_instance(
    seed: int | Sequence[int],
    jobs: int = 10,
    slots: int = 30,
    servers: int = 5,
    *,
    load: float | None = None,
    mixed: bool = False,
) -> Instance:
    """Return an instance with that many jobs, worker servers and PS servers.

    `load` scales the data sets (chunks N, hence worker-slots) until the jobs request that fraction of all
    slots of the most demanded worker resource, as closely as whole chunks allow; durations stay as drawn.
    Raises `InputError` for a load that takes too many chunks.
    """
    rng = np.random.default_rng(seed)
    bare = Instance(slots, GPU_SERVERS[:1], CPU_SERVERS[:1], draw_jobs(rng, jobs, slots))
    instance = with_servers(bare, servers, mixed)
    return instance if load is None else scale_to_load(instance, load, MAX_COUNT)


def with_servers(instance: Instance, servers: int, mixed: bool = False) -> Instance:
    """Return the same jobs on that many worker servers and as many PS servers."""
    return replace(
        instance,
        worker_servers=alternate(GPU_SERVERS, servers, mixed),
        ps_servers=alternate(CPU_SERVERS, servers, mixed),
    )


def draw_history(like: Instance, seed: int, jobs: int = 200) -> tuple[TrainingJob, ...]:
    """Return jobs as in an operator's records: the same distribution and load, other draws."""
    return draw_jobs_like(like, [seed, HISTORY_STREAM], jobs)


def draw_training(like: Instance, count: int) -> list[tuple[Instance, tuple[TrainingJob, ...]]]:
    """Return pairs (instance, history) of the same size and load, from draws that no user's seed gives."""
    training = []
    for index in range(count):
        jobs = draw_jobs_like(like, [index, TRAINING_STREAM], len(like.jobs))
        history = draw_jobs_like(like, [index, TRAINING_STREAM, HISTORY_STREAM], 200)
        training.append((replace(like, jobs=jobs), history))
    return training


def draw_jobs_like(like: Instance, seed: Sequence[int], count: int) -> tuple[TrainingJob, ...]:
    """Return that many jobs, each requesting on average as much as one of the instance."""
    drawn = replace(like, jobs=draw_jobs(np.random.default_rng(seed), count, like.slots))
    load_each = like.load() / max(1, len(like.jobs))
    return (scale_to_load(drawn, load_each * count) if load_each > 0 else drawn).jobs


def alternate(types: Sequence[Amounts], count: int, mixed: bool) -> tuple[Amounts, ...]:
    """Return that many servers, of the first type only or alternating over all types."""
    return tuple(types[index % len(types) if mixed else 0] for index in range(count))


def draw_jobs(rng: np.random.Generator, count: int, slots: int) -> tuple[TrainingJob, ...]:
    """Return jobs in order of arrival; each could finish within the slots if it had the cluster to itself."""
    # A slot's seconds follow from the distribution, not from the jobs drawn, so that all share them.
    slot_s = median_shortest_s() / max(1.0, TYPICAL_SHARE * slots)
    drawn: list[TrainingJob] = []
    while len(drawn) < count:
        job = draw_job(rng, slot_s)
        if job.shortest_duration <= max(1, MAX_WAIT_SHARE * slots):
            arrival = int(rng.integers(0, slots - job.shortest_duration + 1))
            drawn.append(replace(job, arrival=arrival))
    drawn.sort(key=lambda job: job.arrival)
    return tuple(replace(job, job_id=f"job-{index}") for index, job in enumerate(drawn))


@cache
def median_shortest_s() -> float:
    """Return the seconds that the median job of the distribution takes with a worker on every chunk."""
    rng = np.random.default_rng(0)
    return float(np.median([draw_job(rng, 1.0).slots_a_chunk for _ in range(1000)]))


def draw_job(rng: np.random.Generator, slot_s: float) -> TrainingJob:
    """Return a job arriving in slot 0 with the paper's ranges; tau is 0.01 to 1 s a mini-batch."""
    worker = (
        int(rng.integers(0, 5)),
        int(rng.integers(1, 11)),
        int(rng.integers(2, 33)),
        int(rng.integers(5, 11)),
        round(float(rng.uniform(0.1, 5.0)), 2),
    )
    ps = (
        0,
        int(rng.integers(1, 11)),
        int(rng.integers(2, 33)),
        int(rng.integers(5, 11)),
        round(float(rng.uniform(5.0, 20.0)), 2),
    )
    kind = rng.random()
    if kind < 0.10:
        sensitivity = 0.0
    elif kind < 0.65:
        sensitivity = float(rng.uniform(0.01, 1.0))
    else:
        sensitivity = float(rng.uniform(4.0, 6.0))
    return TrainingJob(
        job_id="job",
        arrival=0,
        chunks=int(rng.integers(5, 101)),
        minibatches=int(rng.integers(10, 101)),
        epochs=int(rng.integers(50, 201)),
        minibatch_slots=float(rng.uniform(0.01, 1.0)) / slot_s,
        gradient=float(rng.uniform(30.0, 575.0)) * 8 / 1000 / slot_s,
        worker=worker,
        ps=ps,
        priority=float(rng.uniform(1.0, 100.0)),
        sensitivity=sensitivity,
        target=float(rng.uniform(1.0, 15.0)),
    )


def scale_to_load(instance: Instance, load: float, most: float = math.inf) -> Instance:
    """Return the instance with its chunks scaled by one factor, found by bisection, closest to the load.

    Raises `InputError` for a load at which a job would have more than `most` chunks.
    """
    chunks = np.array([job.chunks for job in instance.jobs])
    slots_a_chunk = np.array([job.slots_a_chunk for job in instance.jobs])
    capacity = np.array(instance.worker_servers).sum(axis=0)
    demands = np.array([job.worker for job in instance.jobs])[:, capacity > 0]

    def chunks_at(factor: float) -> npt.NDArray[np.float64]:
        return np.maximum(1, np.round(chunks * factor))

    def load_at(factor: float) -> float:
        work = np.ceil(chunks_at(factor) * slots_a_chunk * (1 - ROUNDING))
        asked: npt.NDArray[np.float64] = work @ demands / (instance.slots * capacity[capacity > 0])
        return float(asked.max())

    low, high = 0.0, 1.0
    while load_at(high) < load:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if load_at(middle) < load else (low, middle)
    factor = min((low, high), key=lambda each: abs(load_at(each) - load))
    scaled = chunks_at(factor)
    if scaled.max() > most:
        reason = f"takes a job of more than {most:,} chunks; draw more jobs or fewer servers"
        raise InputError(f"load {load:g} {reason}")
    jobs = zip(instance.jobs, scaled.tolist(), strict=True)
    return replace(instance, jobs=tuple(replace(job, chunks=int(count)) for job, count in jobs))
