"""Turns in the search for victims: all that wait have one, of many teams and many kinds of requests."""

from __future__ import annotations

from dataclasses import replace

from resource_manager.core.pending import Kind
from resource_manager.scheduling.preemption.turns import MAX_IN_VAIN, MAX_TEAMS, kinds_in_turn
from tests.scheduling.shared_cluster import Shared


def waiting(teams: int, each: int) -> tuple[Shared, set[Kind]]:
    """Return a cluster with so many kinds of requests of each team, and those."""
    shared = Shared(letters="a")
    shared.submit("busy", 4)
    for team in range(teams):
        for number in range(each):
            shared.submit(f"{team}-{number}", 1, team=f"team-{team}", priority=number)
    return shared, set(shared.state.pending.kinds)


def test_few_kinds_have_their_turn_at_any_time() -> None:
    shared, kinds = waiting(teams=1, each=MAX_IN_VAIN)
    assert kinds_in_turn(shared.state, kinds, shared.current) == kinds


def test_so_many_of_so_many_teams_have_a_turn_and_all_within_a_while() -> None:
    shared, kinds = waiting(teams=2 * MAX_TEAMS, each=2 * MAX_IN_VAIN)
    came: set[Kind] = set()
    for second in range(100):
        turn = kinds_in_turn(shared.state, kinds, replace(shared.current, now=2000.0 + second))
        assert len(turn) == MAX_TEAMS * MAX_IN_VAIN
        came |= turn
    assert came == kinds
