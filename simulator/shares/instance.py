"""Instance of a division of GPUs: fleet, teams, jobs, and how fast each job is on each GPU type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from simulator.errors import InputError
from simulator.io.documents import Document, read_document

Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Rate = Annotated[float, Field(ge=0, le=1e15)]
Rates = tuple[float, ...]
"""Steps/s, or any other unit, by GPU type in the order of the fleet; 0 where a job cannot run."""
Pairs = Mapping[tuple[str, str], tuple[Rates, Rates]]
"""Types of two jobs -> the rates of both on the same GPUs; each pair stands in both orders."""


class Team(Document):
    """Team with its weight; within it jobs get equal parts by their weights, or one after the other."""

    weight: float = Field(gt=0, le=1e9)
    within: Literal["fairness", "fifo"]


class JobDocument(Document):
    """Job of a type in the table of throughputs, or with a throughput of its own by GPU type."""

    name: Name
    type: Name | None = None
    throughput: dict[str, Rate] | None = None
    team: Name | None = None
    weight: float = Field(1.0, gt=0, le=1e9)
    gpus: int = Field(1, ge=1, le=10**6)


class PairDocument(Document, extra="allow"):
    """Two types of jobs on the same GPUs; every further key is a GPU type with the throughput of both."""

    __pydantic_extra__: dict[str, Annotated[list[Rate], Field(min_length=2, max_length=2)]]
    types: list[str] = Field(min_length=2, max_length=2)


class Throughputs(Document, extra="ignore"):
    """Throughputs of types of jobs by GPU type; a published table says more than that."""

    alone: dict[str, dict[str, Rate]] = Field({})
    pairs: list[PairDocument] = Field([])


class InstanceDocument(Document):
    """The whole file; `throughputs` may be the path of another, from this one."""

    gpus: dict[Name, Annotated[int, Field(ge=0, le=10**6)]]
    jobs: list[JobDocument]
    teams: dict[Name, Team] | None = None
    throughputs: Throughputs | str = Throughputs()


@dataclass(frozen=True, slots=True)
class Job:
    """Job on so many GPUs of one type at a time; `kind` is its type in the table of throughputs."""

    name: str
    kind: str | None
    rates: Rates
    team: str | None = None
    weight: float = 1.0
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Instance:
    """Fleet and the jobs that it is divided among."""

    gpus: Mapping[str, int]
    jobs: tuple[Job, ...]
    teams: Mapping[str, Team]
    pairs: Pairs

    def proportional(self, job: Job) -> float:
        """Return the job's throughput if it always runs, on each type in proportion to its number of GPUs."""
        counts = self.gpus.values()
        return sum(count * rate for count, rate in zip(counts, job.rates, strict=True)) / sum(counts)


def read_instance(path: Path) -> Instance:
    """Return the instance in a JSON file; raise `InputError`."""
    document = read_document(path, InstanceDocument)
    if not document.jobs or not any(document.gpus.values()):
        raise InputError(f"there are no {'gpus' if document.jobs else 'jobs'}", path=path)
    table = document.throughputs
    if isinstance(table, str):
        table = read_document(path.parent / table, Throughputs)
    types = tuple(document.gpus)
    alone = {kind: _by_type(rates, types) for kind, rates in table.alone.items()}
    pairs = {}
    for pair in table.pairs:
        (a, b), both = pair.types, pair.__pydantic_extra__
        of_a, of_b = (_by_type({gpu: rates[side] for gpu, rates in both.items()}, types) for side in (0, 1))
        pairs[b, a], pairs[a, b] = (of_b, of_a), (of_a, of_b)
    jobs: dict[str, Job] = {}
    for job in document.jobs:
        where = f"job {job.name!r}"
        if job.name in jobs:
            raise InputError(f"{where}: the name is used twice", path=path)
        if (job.type is None) == (job.throughput is None):
            raise InputError(f"{where}: needs either a type or a throughput of its own", path=path)
        if job.type is not None and job.type not in alone:
            raise InputError(f"{where}: unknown type {job.type!r}; throughputs has no such", path=path)
        if document.teams is not None and job.team is not None and job.team not in document.teams:
            raise InputError(f"{where}: unknown team {job.team!r}; teams has no such", path=path)
        if unknown := set(job.throughput or ()) - document.gpus.keys():
            raise InputError(f"{where}: unknown GPU type {min(unknown)!r}; gpus has no such", path=path)
        rates = alone[job.type] if job.type is not None else _by_type(job.throughput or {}, types)
        jobs[job.name] = Job(job.name, job.type, rates, job.team, job.weight, job.gpus)
    return Instance(document.gpus, tuple(jobs.values()), document.teams or {}, pairs)


def _by_type(rates: Mapping[str, float], types: tuple[str, ...]) -> Rates:
    return tuple(rates.get(gpu, 0.0) for gpu in types)
