"""Rules of teams: contradictions, and the form in which a file states them."""

from __future__ import annotations

import pytest

from resource_manager.core.teams import NO_TEAMS, Team, Teams, check_teams, stated

CAPACITY = {"A100": 8, "H100": 4}


@pytest.mark.parametrize(
    ("teams", "team", "field", "reason"),
    [
        ((Team("a", 9), Team("b", 4)), "b", "guaranteed", "add up to 13 GPUs, but the servers have 12"),
        ((Team("a", parent="b"), Team("b", parent="a")), "a", "parent", "a cycle of parents: a -> b -> a"),
        ((Team("a", parent="a"),), "a", "parent", "a cycle of parents: a -> a"),
        ((Team("a", parent="z"),), "a", "parent", "there is no team 'z'"),
        ((Team("a", 4, limit=2),), "a", "limit", "2 is below what the team is guaranteed, 4"),
        ((Team("a", 1, {"B200": 1}),), "a", "guaranteed", "no server has a GPU of type 'B200'"),
        ((Team("a", 5, {"H100": 5}),), "a", "guaranteed", "5 H100, but the servers have 4"),
        (
            (Team("a", 3, {"H100": 3}), Team("b", 2, {"H100": 2})),
            "b",
            "guaranteed",
            "add up to 5 H100, but the servers have 4",
        ),
        (
            (Team("a", 2), Team("b", 2, parent="a"), Team("c", 1, parent="a")),
            "a",
            "guaranteed",
            "2, but the teams below it are guaranteed 3",
        ),
        (
            (Team("a", limit=2), Team("b", 3, parent="a")),
            "a",
            "limit",
            "2, but the teams below it are guaranteed 3",
        ),
    ],
)
def test_a_contradiction_names_team_field_and_reason(
    teams: tuple[Team, ...], team: str, field: str, reason: str
) -> None:
    found = next(check_teams(Teams(teams), CAPACITY))
    assert found[:2] == (team, field)
    assert reason in found[2]


def test_a_parent_and_its_children_promise_the_same_gpus() -> None:
    teams = (Team("r", 12), Team("a", 8, {"A100": 8}, parent="r"), Team("b", 4, parent="r"))
    assert list(check_teams(Teams(teams), CAPACITY)) == []
    typed = (Team("r", 8, {"A100": 8}), Team("a", 8, {"A100": 8}, parent="r"))
    assert list(check_teams(Teams(typed), CAPACITY)) == []


def test_rules_are_stated_without_defaults() -> None:
    teams = Teams((Team("a", 3, {"A100": 3}, 4, parent="r"), Team("r")), preemption=True)
    assert stated(teams) == {
        "preemption": True,
        "teams": {"a": {"guaranteed": {"A100": 3}, "limit": 4, "parent": "r"}, "r": {}},
    }
    assert stated(NO_TEAMS) == {"teams": {}}
    assert not NO_TEAMS
    assert teams
