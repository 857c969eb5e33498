"""GPU-hours: every hour granted is in one category, however leases begin, turn and end."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import (
    Change,
    Expired,
    Granted,
    Quarantined,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.scheduling.accounting.gpu_hours import (
    CATEGORIES,
    HOUR_S,
    KEYS,
    Hours,
    Measure,
    account,
    hours_by,
)
from tests.storage.walk import Walk, first_state

OUTCOMES = ("SUCCESS", "FAILED", "CANCELLED", "PREEMPTED", "NOT_STARTED", "", "odd")
NODE = Node("s0", 0, {"cpus": 64}, (Gpu(0, "A100"), Gpu(1, "A100"), Gpu(2, "H100"), Gpu(3, "H100")))
BEFORE = Snapshot(version=0, last_fencing_token=0, sequence=0, nodes=(NODE,))


def lease(token: int, *gpu_ids: int, at: float = 0.0, **asked: object) -> Lease:
    request = Request(f"task-{token}", len(gpu_ids), **asked)  # type: ignore[arg-type]
    return Lease(request, (Placement("s0", gpu_ids),), token, at)


def hours(changes: list[Change], until: float, by: tuple[str, ...] = (), **more: object) -> Hours:
    [row] = hours_by(account(BEFORE, changes, until), by, 0.0, until, **more).values()  # type: ignore[arg-type]
    return row


def parts(row: Hours) -> dict[str, float]:
    return {name: amount for name, amount in row.by_category.items() if amount}


def walked(seed: int) -> tuple[list[Change], float, float, float]:
    """Return the changes of a random walk, its end, and GPU-seconds counted by the states.

    They are those allocated, and those in quarantine among them.
    """
    rng, walk, cluster = random.Random(seed), Walk(seed), ClusterState.from_snapshot(first_state())
    changes: list[Change] = []
    now, held_s, quarantined_s = 1000.0, 0.0, 0.0
    for _ in range(120):
        duration = rng.choice((0.0, 1.0, 17.5))
        held_s += duration * held(cluster)
        quarantined_s += duration * held(cluster, quarantined=True)
        now += duration
        for change in walk.changes(cluster, now):
            done = replace(change, at=now)  # the walk lets leases expire early
            if isinstance(done, Released):
                done = replace(done, outcome=rng.choice(OUTCOMES))
            cluster.apply(done)
            changes.append(done)
    return changes, now, held_s, quarantined_s


def held(cluster: ClusterState, *, quarantined: bool = False) -> float:
    return sum(
        len(member.gpu_ids) * each.request.gpu_milli / 1000
        for each in (*cluster.leases.values(), *cluster.remainders.values())
        if each.quarantined or not quarantined
        for member in each.members
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.lists(st.sampled_from(KEYS), unique=True))
def test_the_categories_add_up_to_what_was_held(seed: int, busy: float, by: list[str]) -> None:
    changes, now, held_s, quarantined_s = walked(seed)
    found = account(first_state(), changes, now)
    measures = {segment.fencing_token: Measure(busy) for segment in found.segments[::2]}
    rows = hours_by(found, by, 0.0, now, measures=measures)
    for row in rows.values():
        assert sum(row.by_category.values()) == pytest.approx(row.granted)
        assert min(row.by_category.values()) >= 0
    assert sum(row.granted for row in rows.values()) == pytest.approx(held_s / HOUR_S)
    quarantined = sum(row.by_category["quarantined"] for row in rows.values())
    assert quarantined == pytest.approx(quarantined_s / HOUR_S)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_the_hours_of_parts_of_a_time_add_up_to_those_of_the_whole(seed: int, cuts: list[float]) -> None:
    changes, now, _, _ = walked(seed)
    found = account(first_state(), changes, now)
    times = [900.0, *sorted(900.0 + (now - 900.0) * cut for cut in cuts), now]
    whole = hours_by(found, (), 900.0, now).get((), Hours())
    rows = [hours_by(found, (), start, end).get((), Hours()) for start, end in pairwise(times)]
    for name in CATEGORIES:
        assert sum(row.by_category[name] for row in rows) == pytest.approx(whole.by_category[name])
    assert sum(row.waited for row in rows) == pytest.approx(whole.waited)


@pytest.mark.parametrize(
    ("outcome", "category"),
    [
        ("SUCCESS", "used"),
        ("FAILED", "failed"),
        ("PREEMPTED", "preempted"),
        ("NOT_STARTED", "idle"),
        ("CANCELLED", "unknown"),
    ],
)
def test_the_outcome_decides_what_an_unmeasured_lease_was(outcome: str, category: str) -> None:
    held = lease(1, 0, 1)
    row = hours([Granted(held, 0.0), Released("task-1", 1, HOUR_S, outcome)], 2 * HOUR_S)
    assert (parts(row), row.leases) == ({category: 2.0}, {1})


def test_measured_time_is_split_unless_it_was_lost() -> None:
    row = hours(
        [Granted(lease(1, 0), 0.0), Granted(lease(2, 1), 0.0), Released("task-2", 2, HOUR_S, "FAILED")],
        HOUR_S,
        measures={1: Measure(0.25, 0.5), 2: Measure(0.5, 0.25)},
    )
    assert parts(row) == {"used": 0.25, "idle": 0.75, "failed": 1.0}
    assert row.energy_kwh == pytest.approx(0.75)


def test_quarantine_counts_from_its_start_until_its_end() -> None:
    changes: list[Change] = [
        Granted(lease(1, 0), 0.0),
        Quarantined("task-1", 1, HOUR_S),
        Renewed("task-1", 1, 3 * HOUR_S),
        Released("task-1", 1, 4 * HOUR_S, "SUCCESS"),
    ]
    assert parts(hours(changes, 9 * HOUR_S)) == {"used": 2.0, "quarantined": 2.0}


def test_a_lease_that_expires_or_runs_is_unknown_and_waits_are_counted_apart() -> None:
    waiting = Request("late", 2, gpu_types=("H100",), team="nlp")
    changes: list[Change] = [
        Granted(lease(1, 0), 0.0),
        Queued(waiting, 0.0, 1, 0.0),
        Expired("task-1", 1, HOUR_S),
        Granted(Lease(waiting, (Placement("s0", (2, 3)),), 2, HOUR_S, queued_at=0.0), HOUR_S),
    ]
    rows = hours_by(account(BEFORE, changes, 2 * HOUR_S), ("team", "gpu_type"), 0.0, 2 * HOUR_S)
    assert {key: (parts(row), row.waited) for key, row in rows.items()} == {
        ("(none)", "A100"): ({"unknown": 1.0}, 0.0),
        ("nlp", "H100"): ({"unknown": 2.0}, 1.0),
    }


def test_a_request_that_was_preempted_waits_from_then_on() -> None:
    request = Request("late", 2, gpu_types=("H100",), team="nlp")
    again = Lease(request, (Placement("s0", (2, 3)),), 2, 3 * HOUR_S, queued_at=0.0)
    changes: list[Change] = [Queued(request, 0.0, 1, HOUR_S), Granted(again, 3 * HOUR_S)]
    assert hours(changes, 4 * HOUR_S).waited == 2.0


def test_hours_are_priced_by_type() -> None:
    changes: list[Change] = [Granted(lease(1, 1, 2), 0.0)]
    prices = {"A100": 2.0, "default": 3.0}
    assert hours(changes, HOUR_S, prices=prices).cost == pytest.approx(5.0)
    assert hours(changes, HOUR_S, prices={"A100": 2.0}).cost is None


def test_leases_from_before_the_history_count_within_the_time() -> None:
    before = replace(BEFORE, leases=(lease(1, 0, at=-HOUR_S, team="vision"),))
    rows = hours_by(account(before, [], HOUR_S), ("team",), 0.0, HOUR_S)
    assert {key: row.granted for key, row in rows.items()} == {("vision",): pytest.approx(1.0)}
