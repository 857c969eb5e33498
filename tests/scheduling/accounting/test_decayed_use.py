"""Decayed use: the exact sum, Slurm's documented numbers, and the orders that compare teams by it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Granted,
    InventoryChanged,
    MembersReleased,
    Queued,
    Released,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.team_ledger import Use, held_use
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling.accounting.decayed_use import (
    Share,
    by_fair_tree,
    by_fair_usage,
    fair_tree_ranks,
    fair_usage_factors,
    level_fair_shares,
    shares_of,
    uses_after,
)
from tests.builders import hold, node

HALF_LIFE_S = 1000.0


def test_the_documented_factors_of_slurm_come_out() -> None:
    """slurm.schedmd.com/classic_fair_share.html: accounts A to F, users 1 to 5, and what they used."""
    users = {
        "B": [Share("1", 1, 0.20)],
        "C": [Share("2", 1, 0.25), Share("3", 1, 0.0)],
        "E": [Share("4", 1, 0.25)],
        "F": [Share("5", 1, 0.0)],
    }
    tops = [
        Share("A", 40, 0.0, [Share("B", 30, 0.0, users["B"]), Share("C", 10, 0.0, users["C"])]),
        Share("D", 60, 0.0, [Share("E", 25, 0.0, users["E"]), Share("F", 35, 0.0, users["F"])]),
        Share("root", 0, 0.30),  # the rest of the machine's use
    ]
    factors = fair_usage_factors(tops)
    found = [round(factors[name], 6) for name in "12345"]
    assert found == [0.408479, 0.022097, 0.125, 0.5, 0.749154]


def test_the_fair_tree_ranks_depth_first() -> None:
    tops = [
        Share("a", 1, 0.0, [Share("a1", 1, 30.0), Share("a2", 2, 0.0)]),
        Share("b", 3, 0.0, [Share("b1", 1, 10.0), Share("b2", 1, 40.0)]),
        Share("c", 1, 0.0),
    ]
    ranks = fair_tree_ranks(tops)
    assert sorted(ranks, key=ranks.__getitem__) == ["c", "b", "b1", "b2", "a", "a2", "a1"]
    levels = {account.name: level for level, account in level_fair_shares(tops)}
    assert levels["b"] == pytest.approx((3 / 5) / (50 / 80))


def test_equal_siblings_compare_all_that_is_below_them() -> None:
    tops = [
        Share("a", 1, 0.0, [Share("a1", 1, 30.0), Share("a2", 1, 10.0)]),
        Share("b", 1, 0.0, [Share("b1", 1, 40.0)]),
    ]
    ranks = fair_tree_ranks(tops)
    assert ranks["a"] == ranks["b"]
    assert sorted(("a1", "a2", "b1"), key=ranks.__getitem__) == ["a2", "b1", "a1"]


def test_the_first_below_an_account_shares_the_rank_of_an_equal_sibling_without_any() -> None:
    tops = [Share("user", 1), Share("a", 1, 0.0, [Share("a1", 1), Share("a2", 0)]), Share("late", 1, 5.0)]
    assert fair_tree_ranks(tops) == {"user": 0, "a": 0, "a1": 0, "a2": 1, "late": 2}


@pytest.mark.parametrize(
    ("tops", "factors", "levels"),
    [
        # Nobody used anything yet: all are equal, however they share.
        ([Share("a", 1), Share("b", 3)], {"a": 1.0, "b": 1.0}, {"a": math.inf, "b": math.inf}),
        # Nobody has a share: nobody comes before another.
        ([Share("a", 0, 1.0), Share("b", 0)], {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}),
        ([Share("a", 0, 3.0), Share("b", 2, 1.0)], {"a": 0.0, "b": 2**-0.25}, {"a": 0.0, "b": 4.0}),
    ],
)
def test_who_used_nothing_comes_first_and_who_has_no_share_last(
    tops: list[Share], factors: dict[str, float], levels: dict[str, float]
) -> None:
    assert fair_usage_factors(tops) == factors
    assert {account.name: level for level, account in level_fair_shares(tops)} == levels


def cluster_with(
    *teams: Team, weights: dict[str, float] | None = None, preemption: bool = False
) -> ClusterState:
    cluster = ClusterState([Node("a", 0, {}, tuple(Gpu(i, "A100" if i < 4 else "H100") for i in range(8)))])
    rules = Teams(teams, preemption, half_life_s=HALF_LIFE_S, gpu_weights=weights or {})
    cluster.apply(TeamsChanged(rules, 0.0))
    return cluster


def grant(cluster: ClusterState, lease_id: str, team: str, at: float, *gpu_ids: int) -> None:
    hold(cluster, Request(lease_id, len(gpu_ids), team=team), "a", *gpu_ids, at=at)


def used(cluster: ClusterState, now: float) -> dict[str, float]:
    return {share.name: share.total for share in shares_of(cluster, now)}


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=5), st.floats(0, 3000))
def test_the_use_is_the_integral_of_what_was_held(runs: list[tuple[float, float]], later: float) -> None:
    """Compared with the sum over short steps, each decayed to now."""
    cluster = cluster_with(Team("vision"))
    clock = 0.0
    spans = []
    for number, (pause, length) in enumerate(runs):
        begin, end = clock + pause, clock + pause + length
        grant(cluster, f"x{number}", "vision", begin, 0, 1)
        cluster.apply(Released(f"x{number}", cluster.last_fencing_token, end))
        spans.append((begin, end))
        clock = end
    now = clock + later
    steps = 2000
    sampled = sum(
        2.0
        * (end - begin)
        / steps
        * 2.0 ** -((now - (begin + (k + 0.5) * (end - begin) / steps)) / HALF_LIFE_S)
        for begin, end in spans
        for k in range(steps)
    )
    assert used(cluster, now)["vision"] == pytest.approx(sampled, rel=1e-6, abs=1e-9)


def test_the_formula_of_each_change_gives_the_same_as_the_sum_over_leases() -> None:
    """U <- U 2^(-d/H) + r (H/ln 2)(1 - 2^(-d/H)) at each change, as the design writes it."""
    cluster = cluster_with(Team("vision"), weights={"H100": 3.0})
    amount, rate, at = 0.0, 0.0, 0.0

    def advance(now: float) -> None:
        nonlocal amount, at
        amount = Use(amount, at).at_time(now, HALF_LIFE_S) + held_use(rate, now - at, HALF_LIFE_S)
        at = now

    for now, lease_id, gpu_ids, weighted in ((10.0, "x", (0, 1), 2.0), (300.0, "y", (3, 4), 4.0)):
        advance(now)
        grant(cluster, lease_id, "vision", now, *gpu_ids)
        rate += weighted
    advance(700.0)
    cluster.apply(Released("x", 1, 700.0))
    rate -= 2.0
    advance(1500.0)
    assert used(cluster, 1500.0)["vision"] == pytest.approx(amount, rel=1e-12)


def test_a_state_keeps_its_use_through_trials_snapshots_and_new_rules() -> None:
    cluster = cluster_with(Team("vision"), Team("nlp"))
    grant(cluster, "x", "vision", 0.0, 0, 1)
    with cluster.trial():
        cluster.apply(Released("x", 1, 500.0))
        assert cluster.ledger is not None
        assert cluster.ledger.uses
    assert cluster.ledger.uses == {}
    ended = Released("x", 1, 500.0)
    uses = uses_after(cluster, [ended])
    cluster.apply(ended)
    assert cluster.ledger.uses == uses
    assert uses.keys() == {"vision"}
    again = ClusterState.from_snapshot(cluster.snapshot())
    assert used(again, 900.0) == used(cluster, 900.0)
    cluster.apply(TeamsChanged(Teams((Team("vision", 1),), half_life_s=HALF_LIFE_S), 600.0))
    assert used(cluster, 900.0)["vision"] == pytest.approx(used(again, 900.0)["vision"])


def test_each_end_of_one_commit_adds_to_the_use_that_the_one_before_it_left() -> None:
    """Members of a gang end one by one; another lease begins and ends; two changes end nothing."""
    cluster = cluster_with(Team("vision"), Team("nlp"), weights={"H100": 3.0})
    servers = [Node(name, number, {}, (Gpu(0, "H100"),)) for number, name in enumerate("bc", 1)]
    cluster.apply(InventoryChanged((*(state.node for state in cluster.nodes), *servers), 0.0))
    members = tuple(Placement(name, (0,)) for name in "abc")  # with weights 1, 3 and 3
    cluster.apply(Granted(Lease(Request("x", 1, team="vision", nodes=3), members, 1, 0.0), 0.0))
    short = Lease(Request("y", 1, team="nlp"), (Placement("a", (1,)),), 2, 200.0)
    commit: list[Change] = [
        MembersReleased("x", 1, (1,), 100.0),
        Cancelled("z", 150.0),
        Granted(short, 200.0),
        Released("y", 2, 250.0),
        Released("unknown", 9, 260.0),
        MembersReleased("x", 1, (0, 2), 300.0),
    ]
    first = held_use(3.0, 100.0, HALF_LIFE_S)
    rest = Use(first, 100.0).at_time(300.0, HALF_LIFE_S) + held_use(4.0, 300.0, HALF_LIFE_S)
    uses = uses_after(cluster, commit)
    assert {team: [*use] for team, use in uses.items()} == {
        "vision": [pytest.approx(rest), 300.0],
        "nlp": [pytest.approx(held_use(1.0, 50.0, HALF_LIFE_S)), 250.0],
    }
    for change in commit:
        if change not in (Cancelled("z", 150.0), Released("unknown", 9, 260.0)):
            cluster.apply(change)
    assert cluster.ledger is not None
    assert cluster.ledger.uses == uses


def test_new_rules_carry_the_use_of_the_ends_before_them() -> None:
    """It fades by the half-life of the old rules until then, and by that of the new ones after."""
    cluster = cluster_with(Team("vision"))
    grant(cluster, "x", "vision", 0.0, 0)
    changes: list[Change] = [
        Released("x", 1, 100.0),
        TeamsChanged(Teams((Team("vision", 1),), half_life_s=HALF_LIFE_S / 2), 400.0),
    ]
    uses = uses_after(cluster, changes)
    for change in changes:
        cluster.apply(change)
    left = Use(held_use(1.0, 100.0, HALF_LIFE_S), 100.0).at_time(400.0, HALF_LIFE_S)
    assert {team: [*use] for team, use in uses.items()} == {"vision": [pytest.approx(left), 400.0]}
    assert cluster.ledger is not None
    assert cluster.ledger.uses == uses


def test_a_team_is_charged_for_those_below_it() -> None:
    cluster = cluster_with(Team("research"), Team("vision", parent="research"), Team("nlp"))
    grant(cluster, "x", "vision", 0.0, 0)
    amount = pytest.approx(held_use(1.0, 100.0, HALF_LIFE_S))
    assert used(cluster, 100.0) == {"research": amount, "nlp": 0.0, "": 0.0}
    (research, *_) = shares_of(cluster, 100.0)
    assert {share.name: share.total for share in research.below} == {"vision": amount}


def names(order: list[PendingRequest]) -> list[str]:
    return [pending.lease_id for pending in order]


def test_the_team_that_used_less_of_its_weight_comes_first() -> None:
    cluster = cluster_with(Team("vision", weight=4), Team("nlp", weight=1), Team("none", weight=0))
    grant(cluster, "x", "vision", 0.0, 0, 1)
    grant(cluster, "y", "nlp", 0.0, 2)
    for number, team in enumerate(("none", "nlp", "vision", "nlp", "vision"), 1):
        cluster.apply(Queued(Request(f"{team}-{number}", 1, team=team), 10.0, number, 10.0))
    for order in (by_fair_usage, by_fair_tree):
        assert names(order(cluster, 500.0)) == ["vision-3", "vision-5", "nlp-2", "nlp-4", "none-1"]


def test_equal_use_is_broken_by_what_is_held_at_this_moment() -> None:
    cluster = cluster_with(Team("a"), Team("b"))
    for number, team in enumerate(("a", "a", "b", "b"), 1):
        cluster.apply(Queued(Request(f"{team}-{number}", 1, team=team), 10.0, number, 10.0))
    for order in (by_fair_usage, by_fair_tree):
        assert names(order(cluster, 10.0)) == ["a-1", "b-3", "a-2", "b-4"]


def test_at_one_instant_turns_are_divided_by_weight() -> None:
    cluster = cluster_with(Team("a", weight=1), Team("b", weight=3))
    for number, team in enumerate("aaabbbbb", 1):
        cluster.apply(Queued(Request(f"{team}-{number}", 1, team=team), 10.0, number, 10.0))
    for order in (by_fair_usage, by_fair_tree):
        found = [name[0] for name in names(order(cluster, 10.0))]
        assert found == ["a", "b", "b", "b", "a", "b", "b", "a"]


@pytest.mark.parametrize(("preemption", "expected"), [(False, ["x", "y"]), (True, ["y", "x"])])
def test_in_a_team_the_stated_priority_decides_if_it_can_also_preempt(
    preemption: bool, expected: list[str]
) -> None:
    cluster = cluster_with(Team("a"), preemption=preemption)
    for number, name in enumerate("xy", 1):
        cluster.apply(Queued(Request(name, 1, team="a", priority=number), 10.0, number, 10.0))
    for order in (by_fair_usage, by_fair_tree):
        assert names(order(cluster, 10.0)) == expected


def test_without_rules_of_teams_the_order_is_that_of_arrival() -> None:
    cluster = ClusterState([node("a")])
    for number in (1, 2, 3):
        cluster.apply(Queued(Request(f"t{number}", 1, team=f"{number % 2}"), 0.0, number, 0.0))
    assert names(by_fair_tree(cluster, 5.0)) == ["t1", "t2", "t3"]
    assert shares_of(cluster, 5.0) == []


@given(st.permutations(range(6)))
def test_the_factors_do_not_depend_on_the_order_of_siblings(order: list[int]) -> None:
    shares = [Share(str(i), i + 1.0, float(i * i)) for i in range(6)]
    one = fair_usage_factors(shares)
    other = fair_usage_factors([shares[i] for i in order])
    assert all(one[name] == pytest.approx(other[name]) for name in one)
    assert all(a >= b for a, b in itertools.pairwise(sorted(one.values(), reverse=True)))
