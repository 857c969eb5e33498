"""Deadlines: at risk once, from the interval of the expected end, and told when they are not any more."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta

import pytest

from resource_manager import GPUResourceManager
from resource_manager.manager.serializers import deadline_in_words
from resource_manager.rest.state_follower import StateFollower
from resource_manager.rest.webhooks import event_of
from resource_manager.storage.codec import change_from_dict
from tests.builders import Clock


def risks(manager: GPUResourceManager) -> list[tuple[str, bool]]:
    """Return what the history says of deadlines: of which lease id, and whether it is at risk."""
    return [(each["lease_id"], "ends_by" in each) for each in manager.history(what="deadline")]


@pytest.mark.parametrize("deadline", [3600, "1h", "60min", timedelta(hours=1)])
def test_a_duration_counts_from_the_request_by_the_clock_of_the_store(
    manager: GPUResourceManager, clock: Clock, deadline: float | str | timedelta
) -> None:
    manager.submit("t", 1, deadline=deadline)
    [lease] = manager.leases()
    assert lease["deadline_at"] == clock.now + 3600


@pytest.mark.parametrize("text", ["2030-01-31T18:00+01:00", "2030-01-31 17:00:00+00:00", "2030-01-31T17:00Z"])
def test_a_time_is_that_time(manager: GPUResourceManager, text: str) -> None:
    manager.submit("t", 1, deadline=text)
    assert manager.leases()[0]["deadline_at"] == datetime(2030, 1, 31, 17, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "wrong",
    [
        "soon",
        "2030-01-31T18:00",
        datetime(2030, 1, 31),
        -5,
        0,
        True,
        "11y",
        float("nan"),
        1e12,
        "0001-01-01T00:00+14:00",  # in the year 0 of UTC
        "9999-12-31T23:59-14:00",
    ],
)
def test_a_wrong_deadline_is_refused_in_one_line(manager: GPUResourceManager, wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"^deadline must be a duration of 10 years at most, such as 6h, or a"
    ):
        manager.submit("t", 1, deadline=wrong)  # type: ignore[arg-type]


def test_a_pending_request_at_risk_is_told_once_and_when_it_recovers(
    manager: GPUResourceManager, clock: Clock
) -> None:
    manager.allocate("first", 8, expected_runtime=3600)
    manager.submit("waits", 8, expected_runtime=600, deadline="50min")
    assert [manager.check_deadlines() for _ in range(3)] == [1, 0, 0]
    [entry] = manager.queue()
    assert entry["deadline_at"] == clock.now + 3000
    assert entry["late_end"] == pytest.approx(clock.now + 3600 * math.exp(0.1) + 600, abs=1)
    assert deadline_in_words(entry, clock.now) == "deadline in 50 min, at risk: should end in 1.3 h"
    explained = manager.explain_named("waits")
    assert explained["late_end"] == pytest.approx(entry["late_end"], abs=1)
    manager.release("first")
    assert manager.check_deadlines() == 1
    assert risks(manager) == [("waits", True), ("waits", False)]
    assert manager.leases()[0]["late_end"] is None


def test_a_deadline_that_is_hardly_at_risk_is_told_once_though_each_look_draws_other_runtimes(
    manager: GPUResourceManager, clock: Clock
) -> None:
    draw = random.Random(1)
    for number in range(20):
        manager.allocate(f"train_{number}", 8)
        clock.now += 3600 * draw.lognormvariate(0, 0.1)
        manager.release(f"train_{number}", outcome="SUCCESS")
    manager.allocate("train_20", 8, ttl=86400)
    manager.submit("train_21", 8, deadline="140min")
    told = 0
    for _ in range(60):
        clock.now += 10
        manager.renew("train_20")
        told += manager.check_deadlines()
    assert told == 1


def test_a_running_job_past_its_expected_end_is_at_risk_before_its_deadline(
    manager: GPUResourceManager, clock: Clock
) -> None:
    for seconds in (600, 900, 1200, 1500, 1800):
        manager.allocate("train_1", 8)
        clock.now += seconds
        manager.release("train_1", outcome="SUCCESS")
    manager.allocate("train_2", 8, deadline=2400)
    assert manager.check_deadlines() == 0
    clock.now += 2300.0
    assert manager.check_deadlines() == 1
    manager.release("train_2", outcome="SUCCESS")
    assert manager.check_deadlines() == 1, "nothing is left of what is over"
    assert manager.read(lambda cluster, now: dict(cluster.at_risk)) == {}


def test_without_a_known_runtime_only_a_deadline_that_has_passed_is_told(
    manager: GPUResourceManager, clock: Clock
) -> None:
    manager.allocate("unknown", 8, deadline=60)
    manager.submit("behind", 8, deadline=3600)
    assert manager.check_deadlines() == 0
    clock.now += 61.0
    assert manager.check_deadlines() == 1
    assert risks(manager) == [("unknown", True)]
    clock.now -= 3600.0  # a clock that jumps back takes nothing back of what is not known
    assert manager.check_deadlines() == 0


def test_what_other_tasks_took_puts_no_deadline_at_risk(manager: GPUResourceManager, clock: Clock) -> None:
    for number in range(5):
        manager.allocate(f"nightly_{number}", 8)
        clock.now += 4 * 3600
        manager.release(f"nightly_{number}", outcome="SUCCESS")
    manager.allocate("report", 8, deadline="1h")
    assert manager.check_deadlines() == 0
    manager.release("report")
    manager.allocate("first", 8, expected_runtime=600)
    manager.submit("summary", 8, deadline="1h")
    assert manager.check_deadlines() == 0
    explained = manager.explain_named("summary")
    assert (explained["late_end"], explained["estimated_start"]["ends_by"]) == (None, None)
    assert explained["estimated_start"]["at"] == pytest.approx(clock.now + 600, abs=1)


def test_a_webhook_hears_of_both(manager: GPUResourceManager) -> None:
    manager.allocate("first", 8, expected_runtime=3600)
    manager.submit("waits", 8, expected_runtime=600, deadline="10min", team="vision")
    manager.check_deadlines()
    watch = StateFollower(manager.store)
    [risk] = manager.history(what="deadline")
    change = change_from_dict({name: value for name, value in risk.items() if name != "version"})
    try:
        event = watch.read(lambda cluster, now: event_of(cluster, watch, change))
    finally:
        watch.close()
    assert event is not None
    assert (event.kind, event.team) == ("deadline at risk", "vision")
    assert event.text.startswith("waits f462 may miss its deadline: it should end by ")
