"""Turns of teams: for which requests victims are searched in a pass, however many before them are in vain."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.pending import Kind, kind_of
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_IN_VAIN = 4
"""Maximum number of kinds of requests of one team, searched for in vain, after which it is others' turn."""

MAX_TEAMS = 4
"""Number of teams that have a turn at a time."""

TURN_S = 1.0
"""Duration of a turn."""


def kinds_in_turn(cluster: ClusterState, kinds: set[Kind], current: SchedulingPass) -> set[Kind]:
    """Return the kinds whose turn it is now, however many before them in the queue are in vain.

    It depends on the state and the time alone, so that all processes and a replay agree on it.
    """
    if len(kinds) <= MAX_IN_VAIN:
        return kinds
    of_teams: dict[str, dict[Kind, None]] = {}
    for pending in current.order.starting(cluster, current.now):
        if (kind := kind_of(pending.request)) in kinds:
            of_teams.setdefault(pending.request.team, {})[kind] = None
    teams = _next([*of_teams], MAX_TEAMS, f"teams {current.now // TURN_S}")
    return {
        kind for team in teams for kind in _next([*of_teams[team]], MAX_IN_VAIN, f"{current.now // TURN_S}")
    }


def _next(each: Sequence[Any], count: int, turn: str) -> Sequence[Any]:
    """Return so many of them, from a place that looks random: whatever the time between passes, all come."""
    if len(each) <= count:
        return each
    drawn = int.from_bytes(blake2b(turn.encode(), digest_size=8).digest(), "big")
    return [each[(drawn + place) % len(each)] for place in range(count)]
