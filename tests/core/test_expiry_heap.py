"""Expiry heap: the ends of leases in order, however often they were renewed, without growing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.expiry_heap import MIN_LENGTH, ExpiryHeap
from resource_manager.core.models import Lease, Placement, Request


class Leases(dict[str, Lease]):
    """Leases by id, with a heap of their ends."""

    def __init__(self) -> None:
        self.heap = ExpiryHeap(self)
        self.tokens = 0

    def put(self, lease_id: str, ends: float, *, quarantined: bool = False) -> None:
        """Grant a lease, or renew it under its fencing token."""
        before = self.get(lease_id)
        self.tokens += before is None
        token = self.tokens if before is None else before.fencing_token
        request, placed = Request(lease_id), (Placement("a"),)
        self[lease_id] = Lease(request, placed, token, 0.0, ends, quarantined=quarantined)
        self.heap.push(self[lease_id])

    def due(self, now: float) -> list[str]:
        return [lease.lease_id for lease in self.heap.due(now)]


def test_due_leases_come_in_the_order_of_their_ends_and_stay() -> None:
    leases = Leases()
    for lease_id, ends in (("c", 30.0), ("a", 10.0), ("b", 20.0), ("d", 40.0)):
        leases.put(lease_id, ends)
    assert leases.due(9.9) == []
    for _ in range(2):
        assert leases.due(30.0) == ["a", "b", "c"], "an end counts in its own instant"


def test_of_equal_ends_the_earlier_grant_is_first() -> None:
    leases = Leases()
    for lease_id in "zya":
        leases.put(lease_id, 5.0)
    assert leases.due(5.0) == ["z", "y", "a"]


def test_a_released_a_renewed_and_a_quarantined_lease_are_not_due() -> None:
    leases = Leases()
    for lease_id in ("released", "renewed", "quarantined", "due"):
        leases.put(lease_id, 10.0)
    del leases["released"]
    leases.put("renewed", 20.0)
    leases.put("quarantined", 10.0, quarantined=True)
    assert leases.due(10.0) == ["due"]
    assert leases.due(20.0) == ["due", "renewed"]


def test_a_lease_of_the_same_id_does_not_inherit_the_end() -> None:
    leases = Leases()
    leases.put("t", 10.0)
    del leases["t"]
    leases.put("t", 50.0)
    assert leases.due(49.9) == []
    assert leases.due(50.0) == ["t"]


def test_a_lease_renewed_to_the_same_end_is_due_once() -> None:
    leases = Leases()
    for _ in range(3):
        leases.put("t", 10.0)
    leases.put("u", 10.0)
    assert leases.due(10.0) == ["t", "u"]


def test_a_lease_without_an_end_takes_no_room() -> None:
    leases = Leases()
    leases.put("t", math.inf)
    assert len(leases.heap) == 0
    assert leases.due(1e12) == []


def test_ends_of_released_and_renewed_leases_do_not_pile_up() -> None:
    leases = Leases()
    leases.put("endless", math.inf)
    for number in range(1_000):
        leases.put("renewed", 100.0 + number)
        leases.put("released", 5_000.0)
        del leases["released"]
        assert len(leases.heap) <= MIN_LENGTH + 1
    assert leases.due(1_098.0) == []
    assert leases.due(1_099.0) == ["renewed"]


def test_after_the_heap_was_cleaned_the_ends_are_still_in_order() -> None:
    leases = Leases()
    for lease_id, ends in (("late", 90.0), ("early", 10.0), ("middle", 50.0)):
        leases.put(lease_id, ends)
    for _ in range(MIN_LENGTH):
        leases.put("renewed", 70.0)
    assert len(leases.heap) < MIN_LENGTH
    assert leases.due(10.0) == ["early"]
    assert leases.due(90.0) == ["early", "middle", "renewed", "late"]


def test_a_short_heap_and_one_with_few_outdated_ends_are_left_alone() -> None:
    """Cleaning looks at every lease: it is not worth it there, nor at each renewal of one of many."""
    leases = Leases()
    for number in range(MIN_LENGTH):
        leases.put("t", float(number))
    assert len(leases.heap) == MIN_LENGTH
    leases = Leases()
    for number in range(2 * MIN_LENGTH):
        leases.put(f"t{number % MIN_LENGTH}", float(number))
    assert len(leases.heap) == 2 * MIN_LENGTH


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "hold", "drop"]), st.integers(0, 9)),
        max_size=30,
    ),
    st.integers(0, 10),
)
def test_it_equals_a_look_at_every_lease(steps: list[tuple[str, str, int]], now: int) -> None:
    leases = Leases()
    for lease_id, step, ends in steps:
        if step == "drop":
            leases.pop(lease_id, None)
        else:
            leases.put(lease_id, float(ends), quarantined=step == "hold")
    expected = sorted(
        (lease.expires_at, lease.fencing_token, lease.lease_id)
        for lease in leases.values()
        if lease.expires_at <= now and not lease.quarantined
    )
    assert leases.due(now) == [lease_id for _, _, lease_id in expected]
