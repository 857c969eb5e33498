"""Plays of the queue with preemption: who takes what, when, and what becomes of it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from resource_manager.core.changes import MaintenanceChanged
from resource_manager.core.maintenance import Window
from resource_manager.core.teams import Team
from resource_manager.scheduling.reasons import start_estimates
from resource_manager.scheduling.reasons.play_events import MAX_DELAYS, apply_event, openings
from resource_manager.scheduling.reasons.start_estimates import estimate_starts
from tests.scheduling.shared_cluster import Shared


def borrowed(runtime_s: float) -> Shared:
    """Return a server that a borrower has for so long from 1001 on; two wait from 1002 and 1003 on."""
    shared = Shared(Team("vision", 4), delay_s=30.0)
    shared.submit("borrows", 4, team="nlp", expected_runtime_s=runtime_s, preempt_grace_s=10.0)
    shared.submit("later", 4, team="nlp", expected_runtime_s=1.0)
    shared.submit("mine", 4, team="vision", expected_runtime_s=100.0)
    return shared


def starts(shared: Shared) -> dict[str, float | None]:
    found = estimate_starts(shared.state, shared.current)
    return {lease_id: start.at for lease_id, start in found.items()}


def test_a_request_that_will_preempt_starts_then_and_those_behind_its_victim_wait_for_that() -> None:
    shared = borrowed(10_000.0)
    expected = {"mine": 1043.0, "later": 11_101.0}
    assert starts(shared) == expected
    shared.tick(30.0)
    assert shared.preempting() == {"borrows": "mine"}
    assert starts(shared) == expected


def test_a_job_that_ends_by_itself_in_its_grace_does_not_wait_again() -> None:
    assert starts(borrowed(35.0)) == {"mine": 1036.0, "later": 1136.0}


def test_of_many_requests_that_wait_for_their_delay_some_have_a_step_of_their_own() -> None:
    shared = borrowed(10_000.0)
    for number in range(100):
        shared.submit(f"t{number}", 1, team="nlp")
    times = list(openings(shared.state, shared.now))
    assert times[0] == shared.now + 30.0
    assert 1 < len(times) <= MAX_DELAYS


def test_a_lease_whose_turn_is_over_makes_room_and_waits_behind_the_others_for_the_rest() -> None:
    """Its runtime counted: those behind it were told days, where it gives its GPUs back after hours."""
    shared = Shared()
    shared.submit("turns", 4, expected_runtime_s=9000.0, requeue_after_s=600.0)
    shared.submit("next", 4, expected_runtime_s=100.0, requeue_after_s=80.0)
    begun = shared.state.leases["turns"]
    assert starts(shared) == {"next": begun.granted_at + 600.0}
    assert estimate_starts(shared.state, shared.current)["next"].ends_by == begun.granted_at + 700.0
    with shared.state.trial():
        apply_event(shared.state, begun, begun.granted_at + 600.0)
        assert [pending.lease_id for pending in shared.state.pending.values()] == ["next", "turns"]
        assert shared.state.pending["turns"].request.requeue_after_s is None


def test_a_window_that_comes_again_is_waited_for_as_often_as_leases_end_before_it() -> None:
    """All but the first of them were told that the server is closed, to no known time."""
    hour = 3600.0
    shared = Shared()
    nightly = Window(1, ("a",), 22 * hour, 24 * hour, every_s=24 * hour)
    shared.submit("runs", 4, expected_runtime_s=20 * hour)
    shared.state.apply(MaintenanceChanged((nightly,), shared.now))
    for number in range(6):
        shared.submit(f"w{number}", 2, expected_runtime_s=20 * hour)
    assert starts(shared) == {f"w{number}": (24 + 24 * (number // 2)) * hour for number in range(6)}


def test_windows_that_end_again_and_again_take_no_step_from_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts after a few weeks of nightly windows of many servers were told to be too far."""
    hour, shared = 3600.0, Shared()
    nightly = [
        Window(number, ("a",), 22 * hour, 23 * hour + number, every_s=24 * hour) for number in range(1, 11)
    ]
    for day in range(4):
        shared.submit(f"runs{day}", 1, expected_runtime_s=(12 + 24 * day) * hour)
    shared.state.apply(MaintenanceChanged(tuple(nightly), shared.now))
    shared.submit("waits", 4, expected_runtime_s=hour)
    [last] = [lease for lease in shared.state.leases.values() if lease.lease_id == "runs3"]
    goes_on = Mock(return_value=True)
    for most, steps in ((15, 15 + 15), (100, 15 + 20)):
        monkeypatch.setattr(start_estimates, "MAX_STEPS", most)
        goes_on.reset_mock()
        found = estimate_starts(shared.state, shared.current, goes_on=goes_on)
        assert (found["waits"].at, goes_on.call_count) == (last.granted_at + 84 * hour, steps)


def test_a_lease_at_its_longest_runtime_makes_room_and_does_not_wait_again() -> None:
    shared = Shared(Team("vision", max_runtime_s=600.0))
    shared.submit("limited", 4, team="vision")
    shared.submit("next", 4, team="vision")
    begun = shared.state.leases["limited"]
    assert starts(shared) == {"next": begun.granted_at + 600.0}
    with shared.state.trial():
        apply_event(shared.state, begun, begun.granted_at + 600.0)
        assert list(shared.state.pending) == ["next"]
