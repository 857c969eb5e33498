"""Division of a fleet among its jobs: the policy as asked for, in parts if it is to be divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.errors import SimulationError
from simulator.rounds.linear_programs import get_solver
from simulator.shares.at_once import settle_at_once
from simulator.shares.filling import POLICIES, fill
from simulator.shares.groups import group_jobs
from simulator.shares.instance import Instance
from simulator.shares.parts import divide
from simulator.shares.program import Program, columns_of


@dataclass(frozen=True, slots=True)
class Options:
    """Policy, and how it goes about it; raises `SimulationError` for options that exclude each other."""

    policy: str
    pack: bool = False
    agnostic: bool = False
    parts: int = 1
    settle: str = "filled"
    solver: str = "highs"

    def __post_init__(self) -> None:
        at_once, two_level = self.settle == "at_once", self.policy == "two_level"
        if self.parts > 1 and two_level:
            raise SimulationError("--parts above 1 is for --policy max_min")
        if self.agnostic and self.pack:
            raise SimulationError("--agnostic knows no pairs of jobs: leave out --pack")
        if at_once and (self.pack or not two_level):
            raise SimulationError("--settle at_once is for --policy two_level without --pack")


@dataclass(frozen=True, slots=True)
class Division:
    """Shares of all jobs in the order of the instance; `gpus` by job and type, on average."""

    normalised: Any
    throughput: Any
    gpus: Any
    levels: tuple[float, ...]
    """c of the first program of each part."""
    programs: int


def divide_fleet(instance: Instance, options: Options) -> Division:
    """Return what every job gets; raise `SimulationError` for an instance that the policy cannot divide."""
    if options.policy == "two_level":
        for job in instance.jobs:
            if job.team not in instance.teams:
                raise SimulationError(f"job {job.name!r}: two_level needs a team for every job")
    method = _at_once if options.settle == "at_once" else _filled
    found = [method(part, options) for part in divide(instance, options.parts)]
    jobs = len(instance.jobs)
    normalised, throughput, gpus = np.zeros(jobs), np.zeros(jobs), np.zeros((jobs, len(instance.gpus)))
    for number, part in enumerate(found):
        members = slice(number, None, options.parts)
        normalised[members], throughput[members], gpus[members] = part.normalised, part.throughput, part.gpus
    levels = tuple(level for part in found for level in part.levels)
    return Division(normalised, throughput, gpus, levels, sum(part.programs for part in found))


def _filled(part: Instance, options: Options) -> Division:
    """Fill over groups of alike jobs; without knowledge of the types, all GPUs are one type."""
    groups = group_jobs(part, by_team=options.policy == "two_level", agnostic=options.agnostic)
    fleet = list(part.gpus.values())
    columns = columns_of(groups, part.pairs if options.pack else {}, fleet)
    program = Program(groups, columns, [sum(fleet)] if options.agnostic else fleet)
    filling = fill(program, POLICIES[options.policy](groups, part))
    of_type = np.array(fleet) / sum(fleet) if options.agnostic else 1.0
    gpus = program.gpus_of_a_job(filling.times) * of_type
    places = {number: place for place, group in enumerate(groups) for number in group.members}
    group_of_job = [places[number] for number in range(len(part.jobs))]
    normalised = filling.levels[group_of_job]
    throughput = normalised * [part.proportional(job) for job in part.jobs]
    return Division(normalised, throughput, gpus[group_of_job], (filling.first_level,), filling.programs)


def _at_once(part: Instance, options: Options) -> Division:
    """Settle at once, with every job and every type apart also without knowledge of the types."""
    groups = group_jobs(part, by_team=True, agnostic=False, apart=True)
    rates = np.array([group.rates for group in groups])
    sizes = np.array([job.gpus for job in part.jobs], float)
    known = np.ones_like(rates) if options.agnostic else rates
    weigh = POLICIES[options.policy](groups, part)
    found = settle_at_once(known, sizes, list(part.gpus.values()), weigh, get_solver(options.solver))
    times = np.clip(found.times, 0.0, 1.0) if options.agnostic else found.times
    normalised = (rates * times).sum(axis=1)
    throughput = normalised * [group.proportional for group in groups]
    gpus = sizes[:, None] * np.maximum(found.times, 0.0)
    return Division(normalised, throughput, gpus, (found.first_level,), found.programs)
