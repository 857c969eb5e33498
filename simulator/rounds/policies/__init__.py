"""Round policies by name: which jobs run in the next round, and on how many GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points

from resource_manager.errors import PolicyError
from resource_manager.scheduling.placement.package_policy import load
from simulator.rounds.linear_programs import Solve, get_solver
from simulator.rounds.policies.base import RoundPolicy
from simulator.rounds.policies.optimus import Optimus
from simulator.rounds.policies.shockwave_shares import (
    gandiva_fair,
    max_min_fairness,
    max_sum_throughput,
    min_total_duration,
)
from simulator.rounds.policies.time_shares import RunByShares
from simulator.rounds.policies.tiresias import Tiresias

ROUND_POLICIES: dict[str, Callable[[Solve], RoundPolicy]] = {
    "tiresias": Tiresias,
    "optimus": Optimus,
    "gandiva_fair": partial(RunByShares, gandiva_fair),
    "max_min_fairness": partial(RunByShares, max_min_fairness),
    "max_sum_throughput": partial(RunByShares, max_sum_throughput),
    "min_total_duration": partial(RunByShares, min_total_duration),
}
"""Name -> maker of the policy of one replay, given the solver of linear programs."""

WITHOUT_SOLVER = ("tiresias", "optimus", "gandiva_fair")
"""Those that solve nothing."""

ENTRY_POINT_GROUP = "gpu_resource_manager.round_policies"


def is_round_policy(name: str) -> bool:
    """Return True if a round policy has that name."""
    return name in ROUND_POLICIES or name in entry_points(group=ENTRY_POINT_GROUP).names


def may_solve(name: str) -> bool:
    """Return True if a round policy has that name and may use its solver."""
    return is_round_policy(name) and name not in WITHOUT_SOLVER


def get_round_policy(name: str, solver: str = "highs") -> RoundPolicy:
    """Return a new round policy, built in or from an entry point; raises `PolicyError`."""
    maker = ROUND_POLICIES.get(name)
    if maker is None:
        points = entry_points(group=ENTRY_POINT_GROUP)
        if name not in points.names:
            known = ", ".join(sorted({*ROUND_POLICIES, *points.names}))
            raise PolicyError(f"unknown round policy {name!r}; known are {known}")
        maker = load(points[name])
    return maker(get_solver(solver))
