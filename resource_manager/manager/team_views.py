"""Rules of teams for callers: their check against the state, what they change, and who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Amount
from resource_manager.core.names import listed, name_of, short
from resource_manager.core.team_ledger import UNNAMED, Account, TeamLedger, milli_of
from resource_manager.core.teams import Teams, check_teams, stated
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.positions import dotted
from resource_manager.manager.cluster_results import TeamsView, TeamView
from resource_manager.manager.results import answer_of
from resource_manager.manager.wording import changed_in_words, entries_changed, value_in_words


def check(cluster: ClusterState, teams: Teams, capacity: Mapping[str, int]) -> None:
    """Raise `InvalidRequestError` if the rules contradict each other or the servers, or leave a job alone.

    `capacity` has the GPUs of the servers by type.
    """
    for name, field, reason in check_teams(teams, capacity):
        raise _wrong(name, field, reason)
    named = {team.name for team in teams.teams}
    for team in cluster.teams.teams:
        leases = (*cluster.leases.values(), *cluster.remainders.values())
        holders = [name_of(lease) for lease in leases if lease.request.team == team.name]
        if team.name not in named and holders:
            raise _wrong(
                team.name,
                "",
                f"the team is missing but holds leases ({listed(holders)}): keep it until they have ended",
            )
    before, after = ({team.name: team.user for team in rules.teams} for rules in (cluster.teams, teams))
    for lease in (*cluster.leases.values(), *cluster.remainders.values()):
        name, is_reached = lease.request.team, any(place.launcher != "agent" for place in lease.places)
        if is_reached and (user := before.get(name, "")) != after.get(name, ""):
            raise _wrong(
                name,
                "user",
                f"{user or 'the user of the launcher'} runs the job of {name_of(lease)}, which another "
                "cannot end: keep it until that has ended",
            )


def _wrong(team: str, field: str, reason: str) -> InvalidRequestError:
    parts = [part for part in ("teams", team, field) if part]
    return InvalidRequestError("{}: {}", ".".join(map(short, parts)), reason, field=dotted(parts))


def difference(before: Teams, after: Teams) -> Iterator[str]:
    """Yield what differs between two sets of rules, a line each, in the words of the file."""
    old, new = stated(before), stated(after)
    yield from _changed("", old | {"teams": 0}, new | {"teams": 0})
    for sign, team, rules in entries_changed(old["teams"], new["teams"]):
        if sign == "~":
            yield from _changed(f"teams.{team}.", *rules)
        else:
            stated_new = new["teams"].get(team, {}).items()
            said = "".join(f", {name} {value_in_words(value)}" for name, value in stated_new)
            yield f"{sign} team {team}{said}"


def _changed(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield changed_in_words(f"{prefix}{name}", old.get(name), new.get(name))


def view(cluster: ClusterState) -> TeamsView:
    """Return the rules with what each team holds, and how many of its requests wait."""
    rules = cluster.teams
    ledger = cluster.ledger or TeamLedger(rules, cluster.leases.values(), cluster.by_name)
    waiting = Counter(ledger.of(pending.request).name for pending in cluster.pending.values())
    asked: Counter[str] = Counter()
    for pending in cluster.pending.values():
        asked[ledger.of(pending.request).name] += milli_of(pending.request)
    return answer_of(
        TeamsView,
        rules,
        gpu_weights=dict(rules.gpu_weights),
        capacity=sum(len(node.gpus) for node in cluster.inventory),
        teams=[
            _view(account, waiting[account.name], asked[account.name])
            for account in ledger.accounts.values()
            if account.name != UNNAMED or account.allocated or waiting[UNNAMED]
        ],
    )


def _view(account: Account, waiting: int, requested_gpus: int) -> TeamView:
    team = account.team
    return answer_of(
        TeamView,
        team,
        team=team.name,
        parent=team.parent or None,
        guaranteed_by_type=dict(team.guaranteed_by_type),
        allocated=_gpus(account.allocated),
        borrowed=_gpus(max(account.allocated - account.guaranteed, 0)),
        allocated_by_type={name: _gpus(milli) for name, milli in account.by_type.items() if milli},
        allocated_by_owner={name: _gpus(milli) for name, milli in sorted(account.by_owner.items())},
        waiting=waiting,
        waiting_gpus=_gpus(requested_gpus),
    )


def _gpus(milli: int) -> Amount:
    whole, rest = divmod(milli, MILLI_PER_GPU)
    return milli / MILLI_PER_GPU if rest else whole
