"""Order between teams: inside the guarantee first, then by the share that the next job would make."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import Queued, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.queue.team_order import guaranteed_first
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import node

RULES = Teams((Team("a", 1), Team("b", 2), Team("free")))


def queued(rules: Teams, *asked: tuple[str, str, int, int]) -> ClusterState:
    """Return a cluster with these pending requests: id, team, GPUs, priority."""
    cluster = ClusterState([node("a", 48, 64)])
    cluster.apply(TeamsChanged(rules, 0.0))
    for number, (lease_id, team, gpus, priority) in enumerate(asked, 1):
        cluster.apply(Queued(Request(lease_id, gpus, team=team, priority=priority), 0.0, number, 0.0))
    return cluster


def names(cluster: ClusterState) -> list[str]:
    """Return the order in which the requests start, each as soon as it is its turn."""
    found = []
    for pending in fifo.starting(cluster, 0.0):
        found.append(pending.lease_id)
        place = cluster.nodes[0].place(pending.request)
        cluster.apply(allocator.grant(cluster, pending.request, (place,), 0.0))
    return found


def test_the_share_that_the_job_would_make_decides() -> None:
    cluster = queued(RULES, ("x", "a", 1, 0), ("y", "b", 1, 0), ("z", "b", 1, 0))
    assert names(cluster) == ["y", "x", "z"]


def test_teams_inside_their_guarantee_come_before_those_that_borrow() -> None:
    cluster = queued(RULES, ("w", "free", 1, 0), ("x", "a", 2, 0), ("y", "b", 2, 0), ("z", "b", 1, 0))
    assert names(cluster) == ["y", "z", "x", "w"]


def test_parents_are_compared_before_children() -> None:
    below = (Team("p", 1, parent="d1"), Team("q", 2, parent="d1"), Team("r", 4, parent="d2"))
    rules = Teams((Team("d1", 4), Team("d2", 4), *below))
    cluster = queued(rules, ("p1", "p", 1, 0), ("q1", "q", 1, 0), ("r1", "r", 1, 0), ("r2", "r", 1, 0))
    assert names(cluster) == ["r1", "q1", "r2", "p1"]


def test_in_a_team_the_queue_order_applies_and_with_preemption_the_priority_leads() -> None:
    asked = (("x", "a", 1, 0), ("y", "a", 1, 5))
    assert names(queued(RULES, *asked)) == ["x", "y"]
    assert names(queued(Teams(RULES.teams, preemption=True), *asked)) == ["y", "x"]


def test_only_what_started_counts_while_granting() -> None:
    cluster = queued(RULES, ("big", "b", 2, 0), ("x", "a", 1, 0), ("y", "free", 1, 0))
    cluster.apply(
        allocator.allocate(cluster, Request("r", 47, team="other"), SchedulingPass(first_fit, fifo, 0.0))[0]
    )
    changes = allocator.schedule_pending(cluster, SchedulingPass(first_fit, fifo, 1.0))
    assert [change.lease.lease_id for change in changes] == ["x"]  # type: ignore[union-attr]


teams = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4)
jobs = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=12)


@given(teams, jobs)
def test_the_heap_gives_the_order_of_a_search_over_all_teams(
    rows: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    rules = Teams(
        tuple(
            Team(f"t{i}", guaranteed, parent=f"t{i - 1}" if i and parent == 0 else "")
            for i, (guaranteed, parent) in enumerate(rows)
        )
    )
    cluster = queued(rules, *((f"j{i}", f"t{team}", gpus, 0) for i, (team, gpus) in enumerate(asked)))
    expected = list(_searched(cluster))
    assert names(cluster) == expected


def _searched(cluster: ClusterState) -> Iterator[str]:
    ledger = cluster.ledger
    assert ledger is not None
    left = sorted(cluster.pending.values(), key=lambda pending: pending.sequence)
    counted = dict.fromkeys(ledger.accounts, 0)
    while left:
        first: dict[str, Request] = {}
        for pending in left:
            first.setdefault(ledger.of(pending.request).name, pending.request)

        def key(request: Request) -> tuple[object, ...]:
            levels = []
            for account in reversed(ledger.of(request).path):
                would = counted[account.name] + MILLI_PER_GPU * request.gpus
                share = would / account.guaranteed if account.guaranteed else float("inf")
                levels.append((would > account.guaranteed, share, would / account.team.weight))
            return (*levels, cluster.pending[request.lease_id].sequence)

        best = min(first.values(), key=lambda request: (key(request)[:-1], key(request)[-1]))
        yield best.lease_id
        left = [pending for pending in left if pending.lease_id != best.lease_id]
        for account in ledger.of(best).path:
            counted[account.name] += MILLI_PER_GPU * best.gpus


def by_right(cluster: ClusterState) -> list[str]:
    assert cluster.ledger is not None
    ordered = sorted(cluster.pending.values(), key=lambda pending: pending.sequence)
    return [pending.lease_id for pending in guaranteed_first(cluster.ledger, ordered)]


def test_an_order_that_compares_teams_still_has_those_inside_their_guarantee_first() -> None:
    """Requests before it in the same team count, at every level of the tree."""
    asked = (("w", "free", 1, 0), ("x", "b", 1, 0), ("y", "b", 1, 0), ("z", "b", 1, 0), ("q", "a", 1, 0))
    assert by_right(queued(RULES, *asked)) == ["x", "y", "q", "w", "z"]
    tree = Teams((Team("d", 2), Team("p", 2, parent="d"), Team("q", 2, parent="d")))
    below = (("p1", "p", 1, 0), ("q1", "q", 1, 0), ("p2", "p", 1, 0), ("q2", "q", 1, 0))
    assert by_right(queued(tree, *below)) == ["p1", "q1", "p2", "q2"]
    assert by_right(queued(tree, ("p0", "p", 3, 0), *below)) == ["p1", "q1", "p0", "p2", "q2"]


def test_without_guarantees_the_weight_decides_and_a_weight_of_zero_comes_last() -> None:
    rules = Teams((Team("none", weight=0.0), Team("light", weight=1.0), Team("heavy", weight=4.0)))
    asked = (("n", "none", 1, 0), ("l1", "light", 1, 0), ("l2", "light", 1, 0), ("h1", "heavy", 2, 0))
    assert names(queued(rules, *asked)) == ["h1", "l1", "l2", "n"]


def test_what_started_before_counts_for_the_guarantee() -> None:
    """The second job of `a` is outside it once the first has started; while that waits, it is not."""
    rules = Teams((Team("a", 4), Team("b", 2)))
    asked = (("a1", "a", 3, 0), ("a2", "a", 2, 0), ("b1", "b", 2, 0))
    assert names(queued(rules, *asked)) == ["a1", "b1", "a2"]
    waiting = queued(rules, *asked)
    assert [pending.lease_id for pending in fifo(waiting, 0.0)] == ["a1", "a2", "b1"]
