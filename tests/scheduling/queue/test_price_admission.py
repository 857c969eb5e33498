"""Admission by price: a task's utility must exceed its price, which grows with use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.changes import Queued
from resource_manager.core.models import Gpu, Node, Request, Utility
from resource_manager.core.node_state import NodeState
from resource_manager.errors import InvalidRequestError, SettingsError
from resource_manager.manager.cluster_file.sections import settings_of
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.queue.price_admission import PriceAdmission
from resource_manager.storage.codec import change_from_json, change_to_json
from tests.builders import Clock, granted_lease

HOUR_S = 3600.0


def make(clock: Clock, **settings: object) -> GPUResourceManager:
    return GPUResourceManager(
        Settings(store="memory://"),
        cluster=settings,
        store=MemoryStore(clock=clock),
        inventory=default_inventory(1, 8, 64),
    )


@pytest.fixture
def priced(clock: Clock) -> GPUResourceManager:
    """Manager of one server with 8 GPUs and 64 CPUs, whose GPUs cost 1 per hour idle and 100 when full."""
    return make(clock, admission="price", price_low=1.0, price_high=100.0)


def worth(utility: float, **more: object) -> dict[str, object]:
    return {"utility": utility, "target": 2 * HOUR_S, "expected_runtime": HOUR_S, **more}


def test_by_default_every_task_is_admitted(clock: Clock) -> None:
    manager = make(clock)
    assert manager.submit("cheap", 8, 64, **worth(1e-9))["state"] == "RUNNING"  # type: ignore[arg-type]
    assert manager.explain("next", 2, 4)["admission"] is None


def test_a_task_below_its_price_is_pending_although_it_fits_and_does_not_block(
    priced: GPUResourceManager,
) -> None:
    assert priced.submit("first", 4, 32, **worth(10.0))["state"] == "RUNNING"  # type: ignore[arg-type]
    # Half used: sqrt(100) = 10 per hour for all of a resource; 4 of 8 GPUs and 32 of 64 CPUs cost 10.
    cheap = priced.submit("cheap", 4, 32, **worth(16.0))  # type: ignore[arg-type]
    assert cheap["state"] == "WAITING"
    assert cheap["reason"] == "utility 8 does not exceed the price 10 on gpu-server-0"
    assert priced.submit("dear", 2, 16, **worth(60.0))["state"] == "RUNNING"  # type: ignore[arg-type]
    assert [entry["task_id"] for entry in priced.queue()] == ["cheap"]


def test_a_pending_task_starts_once_its_price_has_fallen(priced: GPUResourceManager) -> None:
    priced.submit("first", 4, 32)
    assert priced.submit("cheap", 4, 32, **worth(16.0))["state"] == "WAITING"  # type: ignore[arg-type]
    priced.release_resources("first")
    status = priced.status_of("cheap")
    assert status is not None
    assert status["state"] == "RUNNING"


def test_a_task_without_a_utility_is_always_admitted(priced: GPUResourceManager) -> None:
    priced.submit("first", 4, 32)
    assert priced.submit("plain", 4, 32)["state"] == "RUNNING"


def test_allocate_returns_at_once_under_admission(priced: GPUResourceManager) -> None:
    priced.submit("first", 4, 32)
    assert priced.allocate_resources("cheap", 4, 32, **worth(16.0)) is None  # type: ignore[arg-type]
    assert priced.allocate_resources("dear", 4, 32, **worth(60.0)) is not None  # type: ignore[arg-type]
    batch = [{"task_id": f"b{i}", "required_gpus": 2, "required_cpus": 2, **worth(1e-6)} for i in range(2)]
    assert priced.allocate_batch(batch) == [None, None]


def test_a_utility_that_falls_with_time_counts_as_of_now(priced: GPUResourceManager, clock: Clock) -> None:
    priced.submit("first", 4, 32)
    late = worth(9.0, sensitivity=0.01)
    assert priced.submit("late", 4, 32, **late)["state"] == "WAITING"  # type: ignore[arg-type]
    clock.now += 10 * HOUR_S
    priced.release_resources("first")
    status = priced.status_of("late")
    assert status is not None
    assert status["state"] == "WAITING"
    assert "e-" in status["reason"], "the utility is close to 0 by now"


def test_explain_shows_price_and_utility(priced: GPUResourceManager) -> None:
    priced.submit("first", 4, 32)
    answer = priced.explain("cheap", 4, 32, **worth(16.0))  # type: ignore[arg-type]
    assert answer["fits"]
    assert not answer["would_be_granted"]
    assert answer["admission"] == {
        "price_per_hour": pytest.approx(10.0),
        "price": pytest.approx(10.0),
        "utility": pytest.approx(8.0),
        "covered": False,
        "servers": {"gpu-server-0": pytest.approx(10.0)},
    }
    plain = priced.explain("plain", 4, 32)
    assert plain["would_be_granted"]
    assert plain["admission"] is not None
    assert plain["admission"]["price_per_hour"] == pytest.approx(10.0)
    assert plain["admission"]["price"] is None


def test_explain_of_a_request_that_waits_counts_its_wait(priced: GPUResourceManager, clock: Clock) -> None:
    priced.submit("first", 4, 32)
    falling = worth(8.0, sensitivity=1.0, target=HOUR_S + 30.0)
    priced.submit("late", 4, 32, **falling)  # type: ignore[arg-type]
    clock.now += 60.0
    admission = priced.explain_named("late")["admission"]
    assert admission is not None
    assert admission["utility"] == pytest.approx(0.0, abs=1e-6)
    assert admission["covered"] is False


def test_a_request_that_backfill_moves_pays_the_price_of_its_server(clock: Clock) -> None:
    settings = {"admission": "price", "price_low": 1.0, "price_high": 100.0}
    manager = GPUResourceManager(
        Settings(store="memory://"),
        cluster=settings,
        store=MemoryStore(clock=clock),
        inventory=default_inventory(2, 8, 64),
    )
    manager.submit("half", 4, server=0, expected_runtime=HOUR_S)
    manager.submit("most", 6, server=1, expected_runtime=HOUR_S)
    manager.submit("head", 8, server=0, expected_runtime=HOUR_S)
    moved = {"expected_runtime": 2 * HOUR_S, "target": 4 * HOUR_S}
    # A quarter of a server costs 10 ** (1 / 2) / 4 an hour where half of it is used, and more on the other.
    poor = manager.submit("poor", 2, utility=20.0, **moved)  # type: ignore[arg-type]
    assert poor["state"] == "WAITING"
    assert poor["reason"].startswith("utility 10 does not exceed the price")
    assert poor["reason"].endswith("on gpu-server-1")
    rich = manager.submit("rich", 2, utility=1000.0, **moved)  # type: ignore[arg-type]
    assert granted_lease(rich)["server_id"] == 1


@given(used=st.integers(0, 7), low=st.floats(1e-3, 10), factor=st.floats(1, 1e4))
def test_prices_rise_with_use_from_low_to_high(used: int, low: float, factor: float) -> None:
    admission = PriceAdmission(low, low * factor)
    node = NodeState(Node("a", 0, {"cpus": 8}, tuple(Gpu(i) for i in range(8))), 0)
    request = Request("r", gpus=8)
    prices = []
    for free in (8 - used, 8 - used - 1):
        node.free_milli = 1000 * free
        prices.append(admission.price_per_hour(node, request))
    assert low * (1 - 1e-9) <= prices[0] <= prices[1] * (1 + 1e-9) <= low * factor * (1 + 1e-8)
    node.free_milli = 0
    assert admission.price_per_hour(node, request) == pytest.approx(low * factor)


def test_utility_is_half_of_its_maximum_at_the_target() -> None:
    utility = Utility(10.0, 100.0, 0.5)
    assert utility.of(100.0) == 5.0
    assert utility.of(0.0) == pytest.approx(10.0)
    assert utility.of(1e6) == 0.0
    assert Utility(10.0, 100.0).of(1e9) == 5.0


def test_a_utility_survives_a_round_trip_through_json() -> None:
    request = Request("r", gpus=2, utility=Utility(10.0, 100.0, 0.5), expected_runtime_s=5.0)
    change = Queued(request, 1.0, 1, 1.0)
    assert change_from_json(change_to_json(change)) == change


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"utility": 5.0, "expected_runtime": 10.0}, "utility needs target"),
        ({"utility": 5.0, "target": 10.0}, "needs expected_runtime"),
        ({"target": 5.0}, "target needs utility as well"),
        ({"utility": -1.0, "target": 1.0, "expected_runtime": 1.0}, "^utility must be greater"),
        (
            {"utility": math.nan, "target": 1.0, "expected_runtime": 1.0},
            "^utility must be a",
        ),
    ],
)
def test_an_incomplete_or_invalid_utility_is_refused(
    priced: GPUResourceManager, wrong: dict[str, float], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        priced.submit("wrong", 2, 2, **wrong)  # type: ignore[arg-type]
    assert priced.queue() == []


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"admission": "price"}, "needs price_low and price_high"),
        ({"price_low": 5, "price_high": 1}, "is above price_high"),
        ({"price_low": 0}, "price_low"),
        ({"admission": "auction"}, "admission"),
    ],
)
def test_invalid_prices_are_refused(stated: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        settings_of(stated)
