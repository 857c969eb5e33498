"""The event queue: order, ties, what is scheduled meanwhile, and times that cannot be."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine import EventQueue
from simulator.errors import SimulationError


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2))))
def test_events_come_by_time_then_priority_then_sequence(planned: list[tuple[int, int]]) -> None:
    queue: EventQueue[int] = EventQueue()
    for number, (time, priority) in enumerate(planned):
        queue.schedule(time, number, priority)
    assert len(queue) == len(planned)
    assert list(queue.pop_due()) == sorted(range(len(planned)), key=lambda number: planned[number])
    assert not queue


def test_events_need_no_order_of_their_own() -> None:
    queue: EventQueue[object] = EventQueue()
    events = [object(), {}, object()]
    for event in events:
        queue.schedule(1.0, event)
    assert list(queue.pop_due()) == events


def test_only_what_is_due_is_removed() -> None:
    queue: EventQueue[str] = EventQueue()
    for time, event in ((3.0, "late"), (2.0, "at the end"), (1.0, "first")):
        queue.schedule(time, event)
    assert list(queue.pop_due(2.0)) == ["first", "at the end"]
    assert (queue.now, queue.next_time, len(queue)) == (2.0, 3.0, 1)
    assert list(queue.pop_due(2.5)) == []
    assert queue.now == 2.5
    assert list(queue.pop_due()) == ["late"]
    assert (queue.now, queue.next_time) == (3.0, math.inf)


def test_a_reader_that_stops_leaves_the_rest() -> None:
    queue: EventQueue[str] = EventQueue()
    for time in (1.0, 2.0, 3.0):
        queue.schedule(time, f"at {time}")
    assert next(queue.pop_due(5.0)) == "at 1.0"
    assert (queue.now, len(queue)) == (1.0, 2)


def test_what_is_scheduled_meanwhile_is_included() -> None:
    queue: EventQueue[int] = EventQueue()
    seen: list[tuple[float, int]] = []
    queue.schedule(0.5, 3)
    for left in queue.pop_due(2.5):
        seen.append((queue.now, left))
        queue.schedule(queue.now + 1.0, left - 1)
    assert seen == [(0.5, 3), (1.5, 2), (2.5, 1)]
    assert (queue.now, queue.next_time) == (2.5, 3.5)


def test_now_may_be_scheduled_at_and_the_past_may_not() -> None:
    queue: EventQueue[str] = EventQueue(now=10.0)
    queue.schedule(10.0, "now")
    for time in (9.999, -math.inf, math.nan):
        with pytest.raises(SimulationError, match=r"cannot be scheduled at 10\.0"):
            queue.schedule(time, "too late")
    assert list(queue.pop_due()) == ["now"]


def test_an_event_at_infinity_never_happens() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.schedule(math.inf, "never")
    assert (len(queue), queue.next_time) == (0, math.inf)


def test_a_copy_goes_on_alike() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.schedule(1.0, "a")
    queue.schedule(1.0, "b")
    copy = pickle.loads(pickle.dumps(queue))
    for each in (queue, copy):
        each.schedule(1.0, "c")
        assert list(each.pop_due()) == ["a", "b", "c"]
