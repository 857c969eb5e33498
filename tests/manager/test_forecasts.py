"""Forecasts: shared by all who ask, made in the background where they cost much, held to their word."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import Granted
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.errors import StoreUnavailableError
from resource_manager.manager import forecasts, queue_view
from resource_manager.manager.forecasts import (
    CALIBRATED,
    ENOUGH_OUTCOMES,
    FEW_DATA,
    RECORDS,
    UNKNOWN,
    EstimateRecord,
    GivenEstimate,
    kept_record,
)
from resource_manager.scheduling.reasons.start_estimates import Start, forecast_starts
from tests.builders import Clock, present
from tests.eventually import wait_for


def run(manager: GPUResourceManager, clock: Clock, lease_id: str, seconds: float) -> None:
    manager.allocate(lease_id, 8)
    clock.now += seconds
    manager.release(lease_id, outcome="SUCCESS")


def test_a_start_hangs_on_a_lease_and_its_interval_on_what_such_tasks_took(
    manager: GPUResourceManager, clock: Clock
) -> None:
    for number, seconds in enumerate((600, 900, 1200, 1500, 1800)):
        run(manager, clock, f"train_{number}", seconds)
    manager.allocate("train_9", 8)
    manager.submit("waits", 8)
    began = clock.now
    [entry] = manager.queue()
    start = entry["estimated_start"]
    earliest, at, latest = present(start["earliest"]), present(start["at"]), present(start["latest"])
    assert start["after"].startswith("train_9 ")
    assert (start["confidence"], start["plays"], start["server_name"]) == (FEW_DATA, 40, "gpu-server-0")
    assert 500 <= earliest - began < 1000 < at - began < 1500 < latest - began
    clock.now += 1700.0
    assert present(manager.explain_named("waits")["estimated_start"]["earliest"]) > clock.now


def test_a_start_behind_a_task_of_which_no_run_is_known_is_unknown_and_says_what_to_state(
    manager: GPUResourceManager, clock: Clock
) -> None:
    for number in range(5):
        run(manager, clock, f"labels_{number}", 1.0)
    manager.allocate("train", 8)
    manager.submit("waits", 8, expected_runtime=600)
    manager.submit("behind", 8)
    entries = (*manager.queue(), *map(manager.explain_named, ("waits", "behind")))
    for start in (entry["estimated_start"] for entry in entries):
        assert (start["at"], start["confidence"]) == (None, "unknown"), "not a second, as other tasks took"
        assert re.fullmatch(
            r"the end of train \w+ is unknown; state runtimes: expected_runtime, --expected-runtime",
            start["detail"],
        )
    for given in kept_record(manager.store).given.values():
        assert (given.kind, given.median, given.earliest, given.latest) == (UNKNOWN, None, None, None)


def test_a_task_that_takes_ten_times_as_long_now_has_an_interval_that_holds_both(
    manager: GPUResourceManager, clock: Clock
) -> None:
    for number, seconds in enumerate([600.0] * 17 + [6000.0] * 3):
        run(manager, clock, f"train_{number}", seconds)
    manager.allocate("train_99", 8)
    manager.submit("waits", 8)
    start = manager.queue()[0]["estimated_start"]
    assert present(start["earliest"]) - clock.now < 700
    assert present(start["latest"]) - clock.now > 5000
    clock.now += 1000.0  # longer than it used to take
    assert present(manager.explain_named("waits")["estimated_start"]["at"]) - clock.now > 3000


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_clock_that_jumped_leaves_a_start_that_is_not_over_and_one_wild_runtime(
    manager: GPUResourceManager, clock: Clock, jump_s: float
) -> None:
    for number in range(10):
        run(manager, clock, f"train_{number}", 600.0)
    manager.allocate("train_99", 8)
    manager.submit("waits", 8, expected_runtime=600)
    given_at = manager.queue()[0]["estimated_start"]["at"]
    clock.now += jump_s
    start = manager.explain_named("waits")["estimated_start"]
    assert clock.now <= present(start["earliest"]) <= present(start["at"]) <= present(start["latest"])
    manager.release("train_99", outcome="SUCCESS")  # ahead, its lease has expired before
    manager.submit("next", 8)
    start = manager.queue()[0]["estimated_start"]
    assert clock.now <= present(start["earliest"]) <= present(start["at"])
    assert present(start["at"]) <= present(start["latest"]) <= clock.now + 2 * 600
    [outcome] = kept_record(manager.store).outcomes
    assert (outcome.given.median, outcome.is_inside) == (given_at, False)
    assert start["confidence"] == FEW_DATA


def test_without_history_it_is_said_whose_runtime_is_missing(manager: GPUResourceManager) -> None:
    manager.allocate("train_9", 8)
    manager.submit("waits", 8)
    start = manager.queue()[0]["estimated_start"]
    assert (start["at"], start["earliest"], start["confidence"]) == (None, None, "unknown")
    assert start["detail"].startswith("the end of train_9 ")


def test_an_estimate_is_kept_with_its_outcome_the_first_one_of_each_request(
    manager: GPUResourceManager, clock: Clock
) -> None:
    manager.allocate("first", 8, expected_runtime=600)
    manager.submit("waits", 8)
    given_at = clock.now
    manager.queue()
    clock.now += 300.0
    manager.queue()
    clock.now += 400.0
    manager.release("first")
    manager.submit("gone", 8)
    manager.queue()
    manager.cancel("gone")
    manager.submit("third", 8)
    manager.queue()
    record = kept_record(manager.store)
    [outcome] = record.outcomes
    assert (outcome.lease_id, outcome.given.at, outcome.given.median) == ("waits", given_at, given_at + 600)
    assert (outcome.started_at, outcome.is_inside) == (given_at + 700, False)
    assert len(record.given) == 1


def test_those_that_wait_longest_are_given_an_estimate_that_is_kept(
    manager: GPUResourceManager, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that came last, whose starts are too far away to be known, no estimate could come true."""
    monkeypatch.setattr(forecasts, "MAX_GIVEN", 2)
    manager.allocate("first", 8, expected_runtime=600)
    for number in range(3):
        manager.submit(f"waits{number}", 8, expected_runtime=60)
    manager.queue()
    given = [each.median for each in kept_record(manager.store).given.values()]
    assert given == pytest.approx([clock.now + 600, clock.now + 660], abs=1)


def outcomes_of(record: EstimateRecord, number: int, draw: Callable[[], float]) -> None:
    """Give so many requests an estimate of 1,000 s without doubt, and start each after what is drawn."""
    for sequence in range(number):
        start = record.widened(Start(1000.0, "a", None, 1000.0, 1000.0), 0.0)
        record.given[sequence] = GivenEstimate(0.0, "within an hour", start.at, start.earliest, start.latest)
        request = Request(f"t{sequence}", 1)
        lease = Lease(request, (Placement("a", (0,)),), sequence + 1, draw(), sequence=sequence)
        record.note(Granted(lease, lease.granted_at))


def test_an_interval_is_a_tenth_of_the_wait_and_a_second_wide_until_enough_is_known_of_its_kind() -> None:
    found = EstimateRecord().widened(Start(1000.0, "a", None, 1000.0, 1000.0), 0.0)
    assert (found.earliest, found.latest) == pytest.approx((903.8, 1106.2), abs=0.1)
    at_once = EstimateRecord().widened(Start(5.0, "a", None, 5.0, 5.0), 5.0)
    assert (at_once.earliest, at_once.at) == (5.0, 5.0), "not before it was asked for"


def test_intervals_of_starts_are_widened_by_their_own_errors() -> None:
    """Runtimes that seemed certain are not, or others come first: what counts is when requests did start."""
    record, draw = EstimateRecord(), random.Random(0)
    outcomes_of(record, 600, lambda: draw.lognormvariate(6.9, 0.7))
    last = record.outcomes[-200:]
    assert sum(outcome.is_inside for outcome in last) / len(last) == pytest.approx(0.8, abs=0.06)


def test_a_request_that_is_pending_beyond_its_interval_widens_the_next_ones_once() -> None:
    record, start = EstimateRecord(), Start(1000.0, "a", None, 1000.0, 1000.0)
    record.given[7] = GivenEstimate(0.0, "within an hour", 1000.0, 900.0, 1100.0)
    before = present(record.widened(start, 0.0).latest)
    record.note_overdue(1100.0)
    assert record.widened(start, 0.0).latest == before, "not yet"
    record.note_overdue(2000.0)
    wider = present(record.widened(start, 0.0).latest)
    assert wider > before
    record.note_overdue(3000.0)
    lease = Lease(Request("t", 1), (Placement("a", (0,)),), 1, 4000.0, sequence=7)
    record.note(Granted(lease, 4000.0))
    assert record.widened(start, 0.0).latest == wider, "its start tells no more"
    assert not record.outcomes[0].is_inside


def test_few_outcomes_are_no_calibration_and_nor_are_many_that_fall_outside() -> None:
    record = EstimateRecord()
    outcomes_of(record, ENOUGH_OUTCOMES - 1, lambda: 1000.0)
    assert record.confidence("within an hour") == FEW_DATA
    for sequence in range(ENOUGH_OUTCOMES):
        started_at = 5000.0 if sequence % 5 else 9000.0
        record.given[sequence] = GivenEstimate(0.0, "later", 5000.0, 4000.0, 6000.0)
        lease = Lease(Request("t", 1), (Placement("a", (0,)),), 1, started_at, sequence=sequence)
        record.note(Granted(lease, 0.0))
    assert record.confidence("later") == CALIBRATED
    assert record.confidence("within an hour") == FEW_DATA
    for sequence in range(ENOUGH_OUTCOMES):
        record.given[sequence] = GivenEstimate(0.0, "later", 5000.0, 4000.0, 6000.0)
    record.note_overdue(7000.0)
    assert record.confidence("later") == FEW_DATA, "as many are pending beyond their intervals"


def test_outcomes_that_were_wrong_together_and_right_together_are_no_calibration() -> None:
    record = EstimateRecord()
    for sequence in range(200):
        record.given[sequence] = GivenEstimate(0.0, "later", 5000.0, 4000.0, 6000.0)
        started_at = 5000.0 if sequence >= 40 else 9000.0
        lease = Lease(Request("t", 1), (Placement("a", (0,)),), 1, started_at, sequence=sequence)
        record.note(Granted(lease, 0.0))
    assert sum(outcome.is_inside for outcome in record.outcomes) == 160, "four of five, but 40 in a row"
    assert record.confidence("later") == FEW_DATA


def test_no_more_outcomes_are_kept_than_that() -> None:
    record, count = EstimateRecord(), forecasts.MAX_OUTCOMES + 15
    outcomes_of(record, count, lambda: 1000.0)
    assert [outcome.lease_id for outcome in record.outcomes] == [f"t{number}" for number in range(15, count)]


def test_dear_forecasts_are_made_in_the_background_and_the_last_one_is_given_meanwhile(
    manager: GPUResourceManager, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, goes_on = threading.get_ident(), threading.Event()
    outages = [StoreUnavailableError("it fails over")]

    def slow(*given: Any) -> Any:
        if threading.get_ident() != asked:
            goes_on.wait(30)
            if outages:
                raise outages.pop()
        dear_at = time.thread_time() + 2 * queue_view.CHEAP_S
        while time.thread_time() < dear_at:
            pass
        return forecast_starts(*given)

    monkeypatch.setattr(forecasts, "forecast_starts", slow)
    manager.allocate("first", 8, expected_runtime=600)
    manager.submit("waits", 8, expected_runtime=60)
    ends_at = clock.now + 600

    def starts() -> list[float | None]:
        return [entry["estimated_start"]["at"] for entry in manager.queue()]

    assert starts() == [ends_at], "who comes first waits for it"
    manager.renew("first")
    assert starts() == [ends_at], "one that was dear may have had to wait"
    manager.submit("second", 8)
    clock.now += queue_view.MAX_AGE_S
    [old, new] = manager.queue()
    assert old["estimated_start"]["at"] == ends_at
    assert new["estimated_start"]["detail"].startswith("not estimated yet")
    goes_on.set()

    def is_new() -> bool:
        clock.now += 1.0
        return starts() == [ends_at, ends_at + 60]

    wait_for(is_new)
    assert not outages, "the first time it could not be made"


def test_an_outcome_that_was_kept_before_names_were_is_called_by_its_id(
    manager: GPUResourceManager, clock: Clock
) -> None:
    manager.allocate("train", 8, expected_runtime=600)
    manager.submit("waits", 8)
    manager.queue()
    clock.now += 600.0
    manager.release("train", outcome="SUCCESS")
    manager.submit("next", 8)
    manager.queue()
    kept = RECORDS.dump_python(kept_record(manager.store), mode="json")
    [outcome] = kept["outcomes"]
    assert outcome.pop("name").startswith("waits ")
    [started] = RECORDS.validate_python(kept).view()["started"]
    assert started["name"] == started["task_id"] == "waits"


@pytest.mark.parametrize(
    "kept", [b'{"version": 1, "new": 1}', b'{"version": 1, "coverage": {"later": [0, 0, 1, "new"]}}']
)
def test_a_newer_service_beside_this_one_may_keep_estimates_in_another_form(
    manager: GPUResourceManager, kept: bytes
) -> None:
    """As in an upgrade of one service after the other."""
    manager.store.reports.put(forecasts.RECORD, b"{}", kept, 1.0)
    manager.allocate("train", 8, expected_runtime=600)
    manager.submit("waits", 8)
    [entry] = manager.queue()
    assert entry["estimated_start"]["at"] is not None
    assert manager.estimates()["started"] == []


@pytest.mark.parametrize("walked", [2, 5])
def test_a_service_that_starts_knows_what_tasks_took_that_were_granted_lately(
    manager: GPUResourceManager, clock: Clock, monkeypatch: pytest.MonkeyPatch, walked: int
) -> None:
    """They had no runs but those whose grants and ends were walked, and took what other tasks did."""
    for number in range(20):
        run(manager, clock, f"labels_{number}", 1.0)
    for number in range(5):
        run(manager, clock, f"train_{number}", 6000.0)
    manager.allocate("train_9", 8)
    manager.submit("waits", 8)
    monkeypatch.setattr(forecasts, "MAX_WALK", walked)
    restarted = GPUResourceManager(manager.settings, store=manager.store)
    start = restarted.queue()[0]["estimated_start"]
    assert present(start["at"]) - clock.now == pytest.approx(6000, rel=0.05)


def test_fewer_gpus_than_may_be_asked_for_are_no_alternative() -> None:
    with GPUResourceManager.from_url("memory://") as manager:  # whose servers are for 2 GPUs a task at least
        for server in range(4):
            manager.allocate(f"most{server}", 7, 1, server=server)
        assert [each["change"] for each in manager.explain("w", 4, 1)["alternatives"]] == []
        assert manager.explain("w", 2, 1)["alternatives"] == []
