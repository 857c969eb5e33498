"""Teams: what each is guaranteed, how much it may hold at most, and when leases may be taken for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from resource_manager.core.models import MILLI_PER_GPU, PREEMPT_GRACE_S, Amount

DAY_S = 86_400.0

MIN_RUNTIME_S = 600.0
"""Time after its start in which a lease is not preempted."""

PREEMPTION_DELAY_S = 30.0
"""Time that a pending request waits for free capacity before it preempts."""

HALF_LIFE_S = 7 * DAY_S
"""Time in which past use counts half."""


@dataclass(frozen=True, slots=True)
class Team:
    """Rules of one team, in GPUs: a GPU fraction counts as that part of one.

    `guaranteed` is the sum of `guaranteed_by_type`, if that is given. `limit` is never exceeded. `weight` is
    the team's share of what no guarantee needs. The numbers of `parent` bound all teams below it together.
    `max_runtime_s` bounds a lease's runtime, `max_gpus_per_owner` the GPUs of one owner. `min_runtime_s`
    replaces the one of all teams, `idle_below` (percent), `idle_after_s`, `idle_action` and `max_priority`
    those of the settings. `user` is the account on servers as which plain jobs of the team run, empty: the
    launcher's.
    """

    name: str
    guaranteed: Amount = 0
    guaranteed_by_type: Mapping[str, Amount] = field(default_factory=dict)
    limit: Amount | None = None
    weight: float = 1.0
    parent: str = ""
    max_runtime_s: float | None = None
    max_gpus_per_owner: Amount | None = None
    min_runtime_s: float | None = None
    idle_below: float | None = None
    idle_after_s: float | None = None
    idle_action: str | None = None
    max_priority: int | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class Teams:
    """Rules of all teams, as one file states them; without any, no team has a right before another.

    Leases are preempted only with `preemption`. `half_life_s` and `gpu_weights` (by type of GPU, 1 if not
    named) say how past use counts in the orders that know it.
    """

    teams: tuple[Team, ...] = ()
    preemption: bool = False
    min_runtime_s: float = MIN_RUNTIME_S
    preemption_delay_s: float = PREEMPTION_DELAY_S
    half_life_s: float = HALF_LIFE_S
    gpu_weights: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True if there is any rule."""
        return self != NO_TEAMS


def milli_of_gpus(amount: Amount) -> int:
    """Return an amount of GPUs in thousandths of one, whose sums are exact."""
    return round(MILLI_PER_GPU * amount)


MAX_LEVELS = 16
"""Most levels of teams: each decision adds up what is above and below one."""


def check_teams(teams: Teams, capacity: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Yield each contradiction: the team, its field and the reason.

    `capacity` has the GPUs of the inventory by type. That the guarantees are within the capacity is a rule of
    the file, not of the state: servers may fail.
    """
    by_name = {team.name: team for team in teams.teams}
    below_of: dict[str, list[Team]] = {}
    for team in teams.teams:
        below_of.setdefault(team.parent, []).append(team)
    for team in teams.teams:
        if team.parent and team.parent not in by_name:
            yield team.name, "parent", f"there is no team {team.parent!r}"
            return
        path = _path(team, by_name)
        if path[-1] in path[:-1]:
            cycle = " -> ".join(path[path.index(path[-1]) :])
            yield team.name, "parent", f"a cycle of parents: {cycle}"
            return
        if len(path) > MAX_LEVELS:
            yield team.name, "parent", f"its chain of parents is longer than {MAX_LEVELS - 1}"
            return
        if team.limit is not None and milli_of_gpus(team.limit) < milli_of_gpus(team.guaranteed):
            what = f"{team.limit:g} is below what the team is guaranteed, {team.guaranteed:g}"
            yield team.name, "limit", what
        if team.max_runtime_s is not None and team.max_runtime_s <= PREEMPT_GRACE_S:
            yield (
                team.name,
                "max_runtime",
                f"{team.max_runtime_s:g} s must be above preempt_grace ({PREEMPT_GRACE_S:g} s), the time to "
                "save what was done",
            )
        for gpu_type, amount in team.guaranteed_by_type.items():
            if gpu_type not in capacity:
                known = ", ".join(sorted(filter(None, capacity))) or "none is named"
                yield team.name, "guaranteed", f"no server has a GPU of type {gpu_type!r} (types: {known})"
            elif amount > capacity[gpu_type]:
                what = f"{amount:g} {gpu_type}, but the servers have {capacity[gpu_type]}"
                yield team.name, "guaranteed", what
    for parent in teams.teams:
        children = below_of.get(parent.name, [])
        promised = sum(milli_of_gpus(team.guaranteed) for team in children)
        below = f"but the teams below it are guaranteed {promised / MILLI_PER_GPU:g}"
        if promised > milli_of_gpus(parent.guaranteed) and parent.guaranteed:
            yield parent.name, "guaranteed", f"{parent.guaranteed:g}, {below}"
        if parent.limit is not None and promised > milli_of_gpus(parent.limit):
            yield parent.name, "limit", f"{parent.limit:g}, {below}"
        for gpu_type in capacity if parent.guaranteed_by_type else ():
            most = parent.guaranteed_by_type.get(gpu_type, 0)
            promised = sum(milli_of_gpus(team.guaranteed_by_type.get(gpu_type, 0)) for team in children)
            below = f"but the teams below it are guaranteed {promised / MILLI_PER_GPU:g}"
            if promised > milli_of_gpus(most):
                yield parent.name, "guaranteed", f"{most:g} {gpu_type}, {below}"
    for counted, count in ((None, sum(capacity.values())), *capacity.items()):
        tops = {team.name: _promised(team, below_of, counted) for team in below_of.get("", [])}
        if (promised := sum(tops.values())) > MILLI_PER_GPU * count:
            totals = zip(tops, accumulate(tops.values()), strict=True)
            over = next(name for name, total in totals if total > MILLI_PER_GPU * count)
            added = f"{promised / MILLI_PER_GPU:g} {counted or 'GPUs'}"
            yield over, "guaranteed", f"the guarantees add up to {added}, but the servers have {count}"


def _promised(team: Team, below_of: Mapping[str, Sequence[Team]], gpu_type: str | None) -> int:
    """Return what a team and those below it are guaranteed together, of that type or in all, in milli."""
    below = sum(_promised(child, below_of, gpu_type) for child in below_of.get(team.name, ()))
    own = team.guaranteed if gpu_type is None else team.guaranteed_by_type.get(gpu_type, 0)
    return max(below, milli_of_gpus(own))


def _path(team: Team, by_name: Mapping[str, Team]) -> list[str]:
    """Return the names from a team upward: up to one that comes again, or one more than `MAX_LEVELS`."""
    path, above = [team.name], team.parent
    while above in by_name and len(path) <= MAX_LEVELS:
        path.append(above)
        if above in path[:-1]:
            break
        above = by_name[above].parent
    return path


def stated(teams: Teams) -> dict[str, Any]:
    """Return the rules in the form of a teams file, without what is at its default."""
    return {
        **_differing(teams, NO_TEAMS, FILE_NAMES),
        "teams": {team.name: _stated_team(team) for team in teams.teams},
    }


def _stated_team(team: Team) -> dict[str, Any]:
    found = _differing(team, Team(team.name), TEAM_NAMES)
    return {**found, "guaranteed": dict(team.guaranteed_by_type)} if team.guaranteed_by_type else found


def _differing(rules: object, usual: object, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that are not as usual, under their keys in the file."""
    return {
        name: getattr(rules, key) for name, key in names.items() if getattr(rules, key) != getattr(usual, key)
    }


NO_TEAMS = Teams()

FILE_NAMES = {each.name.removesuffix("_s"): each.name for each in fields(Teams) if each.name != "teams"}
"""Key of a teams file -> field of `Teams`."""

TEAM_NAMES = {
    each.name.removesuffix("_s"): each.name
    for each in fields(Team)
    if each.name not in ("name", "guaranteed_by_type")
}
"""Key of a team's table -> field of `Team`."""
