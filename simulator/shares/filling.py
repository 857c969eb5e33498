"""Filling (Narayanan et al., Gavel, OSDI 2020): levels rise until no job gains without another's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from simulator.shares.groups import Group
from simulator.shares.instance import Instance
from simulator.shares.program import Program

HELD = 1e-7
"""Dual, as a part of the sum of all, above which a job is held by every optimum."""

Weigh = Callable[[Any], Any]
"""(which groups have settled) -> weight of one job of each group, 0 for those whose level does not rise."""


def max_min(groups: Sequence[Group], instance: Instance) -> Weigh:
    """Return weights as the jobs state them, of all that have not settled; teams play no part."""
    stated = np.array([group.job.weight for group in groups])
    return lambda settled: np.where(settled, 0.0, stated)


def two_level(groups: Sequence[Group], instance: Instance) -> Weigh:
    """Return weights that divide each team's weight among its jobs.

    Where a team goes by fairness, a job that settles leaves its weight to the rest; by fifo, the first job
    that has not settled has all of it.
    """
    stated = np.array([group.job.weight for group in groups])
    counts = np.array([len(group.members) for group in groups])
    teams = [
        (team, np.flatnonzero([group.job.team == name for group in groups]))
        for name, team in instance.teams.items()
    ]

    def weigh(settled: Any) -> Any:
        weights = np.zeros(len(groups))
        for team, members in teams:
            left = members[~settled[members]]
            if team.within == "fifo":
                left = left[:1]
                weights[left] = team.weight
            else:
                weights[left] = team.weight * stated[left] / np.dot(stated[left], counts[left])
        return weights

    return weigh


POLICIES = {
    "max_min": max_min,
    "two_level": two_level,
}


class Filling(NamedTuple):
    """Levels of one job of each group, the times of the last program, and the first program's c.

    `times` are by column of the program, or of `settle_at_once` by job and type.
    """

    levels: Any
    times: Any
    first_level: float
    programs: int


def fill(program: Program, weigh: Weigh) -> Filling:
    """Solve programs until all jobs have settled; the levels are unique."""
    sizes = np.array([group.job.gpus for group in program.groups], float)
    levels, settled = np.zeros(len(sizes)), np.zeros(len(sizes), bool)
    rises: list[float] = []
    while not settled.all():
        weights = weigh(settled) / sizes
        level, normalised, duals, times = program.solve(weights, levels)
        levels = np.minimum(levels + max(level, 0.0) * weights, normalised)
        held_by = duals * weights  # of all active groups together 1
        settled |= (held_by > HELD) | (held_by == held_by.max())
        rises.append(level)
    return Filling(levels, times, rises[0], len(rises))
