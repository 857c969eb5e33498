"""Maintenance windows: which one is open or comes next, and what crosses it."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.maintenance import WEEK_S, Window, as_text, preemptor_in_words
from resource_manager.core.server_facts import InWindow
from resource_manager.manager.refusal_wording import detail_of

ONCE = Window(1, ("s1",), 100.0, 200.0, reason="new fans")
WEEKLY = Window(2, ("s1",), 100.0, 200.0, WEEK_S)


@pytest.mark.parametrize(
    ("window", "at", "expected"),
    [
        (ONCE, 0.0, (100.0, 200.0)),
        (ONCE, 199.0, (100.0, 200.0)),
        (ONCE, 200.0, None),
        (WEEKLY, 199.0, (100.0, 200.0)),
        (WEEKLY, 200.0, (100.0 + WEEK_S, 200.0 + WEEK_S)),
        (WEEKLY, 200.0 + 3 * WEEK_S, (100.0 + 4 * WEEK_S, 200.0 + 4 * WEEK_S)),
    ],
)
def test_the_window_that_is_open_or_comes_next(
    window: Window, at: float, expected: tuple[float, float] | None
) -> None:
    assert window.occurrence(at) == expected


@pytest.mark.parametrize(
    ("start", "runtime_s", "crosses"),
    [(0.0, 100.0, False), (0.0, 100.5, True), (100.0, 0.0, True), (199.0, 0.0, True), (200.0, 1e9, False)],
)
def test_a_run_crosses_a_window_that_it_reaches(start: float, runtime_s: float, crosses: bool) -> None:
    assert (ONCE.crossed(start, runtime_s) is not None) == crosses


def test_a_window_is_said_with_its_times_in_utc_and_its_reason() -> None:
    assert detail_of(InWindow(0.0, 86_401.0, ONCE.reason)) == (
        "maintenance from 1970-01-01T00:00Z until 1970-01-02T00:00:01Z: new fans"
    )
    assert as_text(60.0) == "1970-01-01T00:01Z"


@given(st.integers(0, 253_000_000_000))
def test_the_text_is_the_time_in_utc(at: int) -> None:
    assert datetime.fromisoformat(as_text(at)).timestamp() == at


def test_a_weekly_window_that_began_long_after_1970_comes_next_within_a_week() -> None:
    window = Window(3, ("s1",), 10.4 * WEEK_S, 10.5 * WEEK_S, WEEK_S)
    assert window.occurrence(10.6 * WEEK_S) == pytest.approx((11.4 * WEEK_S, 11.5 * WEEK_S))


def test_what_preempts_for_a_window_is_said_without_the_separator() -> None:
    assert preemptor_in_words(WEEKLY.preemptor) == "maintenance 2"
    assert preemptor_in_words("dag/run/task") == "dag/run/task"
