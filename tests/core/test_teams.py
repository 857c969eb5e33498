"""Rules of teams: contradictions, and the form in which a file states them."""

from __future__ import annotations

import pytest

from resource_manager.core.teams import MAX_LEVELS, NO_TEAMS, Team, Teams, check_teams, stated

CAPACITY = {"A100": 8, "H100": 4}


@pytest.mark.parametrize(
    ("teams", "team", "field", "reason"),
    [
        ((Team("a", 9), Team("b", 4)), "b", "guaranteed", "add up to 13 GPUs, but the servers have 12"),
        ((Team("a", parent="b"), Team("b", parent="a")), "a", "parent", "a cycle of parents: a -> b -> a"),
        ((Team("a", parent="a"),), "a", "parent", "a cycle of parents: a -> a"),
        ((Team("a", parent="z"),), "a", "parent", "there is no team 'z'"),
        ((Team("a", 4, limit=2),), "a", "limit", "2 is below what the team is guaranteed, 4"),
        (
            (Team("a", 1, {"B200": 1}),),
            "a",
            "guaranteed",
            "no server has a GPU of type 'B200' (types: A100, H100)",
        ),
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
        (
            (Team("a", 8, {"A100": 8}), Team("b", 2, {"A100": 2}, parent="a"), Team("c", 1, {"A100": 1})),
            "c",
            "guaranteed",
            "add up to 9 A100, but the servers have 8",
        ),
        (
            (Team("a", 3, {"H100": 3}), Team("b", 2, {"A100": 2}, parent="a")),
            "a",
            "guaranteed",
            "0 A100, but the teams below it are guaranteed 2",
        ),
    ],
)
def test_a_contradiction_names_team_field_and_reason(
    teams: tuple[Team, ...], team: str, field: str, reason: str
) -> None:
    found = next(check_teams(Teams(teams), CAPACITY))
    assert found[:2] == (team, field)
    assert reason in found[2]


def test_a_longest_runtime_within_the_grace_names_both() -> None:
    ((team, field, reason),) = check_teams(Teams((Team("a", max_runtime_s=60.0),)), CAPACITY)
    assert (team, field) == ("a", "max_runtime")
    assert reason == "60 s must be above preempt_grace (60 s), the time to save what was done"
    assert not [*check_teams(Teams((Team("a", max_runtime_s=60.5),)), CAPACITY)]


def test_without_types_in_the_inventory_the_contradiction_says_so() -> None:
    (_, _, reason), *_ = check_teams(Teams((Team("a", 1, {"B200": 1}),)), {"": 8})
    assert reason == "no server has a GPU of type 'B200' (types: none is named)"


def test_the_team_named_is_the_first_that_the_servers_cannot_hold() -> None:
    teams = (Team("a", 8), Team("b", 4), Team("c", 1), Team("d", 1))
    assert [found[0] for found in check_teams(Teams(teams), CAPACITY)] == ["c"]


def test_teams_have_as_many_levels_as_a_decision_can_add_up() -> None:
    """A chain of thousands took minutes to check, and ended with an error of its own."""
    chain = [Team(f"t{number}", parent=f"t{number + 1}") for number in range(3_000)]
    deep = Teams((*chain, Team("t3000")))
    found = [name for name, field, reason in check_teams(deep, {}) if "longer than 15" in reason]
    assert found == ["t0"]
    flat = Teams((*chain[-MAX_LEVELS + 1 :], *deep.teams[-1:]))
    assert list(check_teams(flat, {})) == []


def test_a_cycle_that_a_team_only_leads_into_is_named_alone() -> None:
    teams = (Team("in", parent="a"), Team("a", parent="b"), Team("b", parent="a"))
    (found,) = check_teams(Teams(teams), CAPACITY)
    assert found == ("in", "parent", "a cycle of parents: a -> b -> a")


@pytest.mark.parametrize(
    ("teams", "found"),
    [
        # The highest team that states a type counts for it, also above teams that state none.
        ((Team("r", 8, {"A100": 8}), Team("m", parent="r"), Team("a", 8, {"A100": 8}, parent="m")), []),
        ((Team("r", 8), Team("a", 8, {"A100": 8}, parent="r"), Team("b", 0, parent="r")), []),
        (
            (
                Team("r", 8, {"A100": 8}),
                Team("a", 8, {"A100": 8}, parent="r"),
                Team("b", 4, {"A100": 4}),
            ),
            ["b"],
        ),
    ],
)
def test_a_type_is_promised_once_in_each_branch(teams: tuple[Team, ...], found: list[str]) -> None:
    assert [team for team, _, reason in check_teams(Teams(teams), CAPACITY) if "A100" in reason] == found


@pytest.mark.parametrize("team", [Team("a", 3, limit=3), Team("a", 12)])
def test_a_limit_or_the_servers_may_be_promised_in_full(team: Team) -> None:
    below = Team("b", team.guaranteed, parent="a")
    assert list(check_teams(Teams((team, below)), CAPACITY)) == []


def test_a_parent_and_its_children_promise_the_same_gpus() -> None:
    teams = (Team("r", 12), Team("a", 8, {"A100": 8}, parent="r"), Team("b", 4, parent="r"))
    assert list(check_teams(Teams(teams), CAPACITY)) == []
    typed = (Team("r", 8, {"A100": 8}), Team("a", 8, {"A100": 8}, parent="r"))
    assert list(check_teams(Teams(typed), CAPACITY)) == []


@pytest.mark.parametrize("parent", [Team("p", 0.3), Team("p", limit=0.3), Team("p", 0.1 + 0.2, limit=0.3)])
def test_parts_of_gpus_add_up_exactly(parent: Team) -> None:
    """`0.3, but the teams below it are guaranteed 0.3`, it said: 0.1 + 0.2 is more."""
    teams = Teams((parent, Team("a", 0.1, parent="p"), Team("b", 0.2, parent="p")))
    assert [*check_teams(teams, CAPACITY)] == []
    over = Teams(tuple(Team(name, 1.1) for name in "abc"))
    ((_, _, reason),) = check_teams(over, {"A100": 3})
    assert reason == "the guarantees add up to 3.3 GPUs, but the servers have 3"


def test_rules_are_stated_without_defaults() -> None:
    teams = Teams((Team("a", 3, {"A100": 3}, 4, parent="r"), Team("r")), preemption=True)
    assert stated(teams) == {
        "preemption": True,
        "teams": {"a": {"guaranteed": {"A100": 3}, "limit": 4, "parent": "r"}, "r": {}},
    }
    assert stated(NO_TEAMS) == {"teams": {}}
    assert not NO_TEAMS
    assert teams
