"""Values of a request and its lease: which are refused, and what decides where a request fits."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.models import Lease, Link, Placement, Request, Spread, TypeChoice, Utility
from resource_manager.core.pending import PendingRequest
from resource_manager.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("wrong", "field", "words"),
    [
        ({"lease_id": ""}, "lease_id", "must not be empty"),
        ({"gpus": -1}, "gpus", "must not be negative, got -1"),
        ({"gpus": 1, "gpu_milli": 0}, "gpu_milli", "between 1 and 1000, got 0"),
        ({"gpus": 1, "gpu_milli": 1001}, "gpu_milli", "between 1 and 1000, got 1001"),
        ({"gpus": 2, "gpu_milli": 500}, "gpu_milli", "gpu_milli=500 goes with gpus=1, got gpus=2"),
        ({"gpus": 0, "gpu_milli": 500}, "gpu_milli", "goes with gpus=1, got gpus=0"),
        ({"resources": {"cpus": -1}}, "resources", "cpus must be a finite amount of 0 or more, got -1"),
        ({"resources": {"cpus": math.inf}}, "resources", "got inf"),
        ({"resources": {"cpus": math.nan}}, "resources", "got nan"),
        ({"ttl_s": 0.0}, "ttl_s", "must be above 0, got 0.0"),
        ({"ttl_s": math.nan}, "ttl_s", "must be above 0, got nan"),
        ({"nodes": 0}, "nodes", "nodes must be 1 or more, got 0"),
        ({"utility": Utility(1.0, 1.0)}, "expected_runtime_s", "utility needs expected_runtime_s"),
    ],
)
def test_a_wrong_request_names_its_field(wrong: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request(**{"lease_id": "t", **wrong})
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "most", [{"gpus": 1, "gpu_milli": 1}, {"gpus": 0}, {"gpus": 10**6}, {"ttl_s": math.inf}]
)
def test_the_ends_of_the_ranges_are_right(most: dict[str, Any]) -> None:
    assert Request("t", **most).lease_id == "t"


PLACING: dict[str, Any] = {
    "gpus": 1,
    "gpu_milli": 500,
    "resources": {"cpus": 2},
    "gpu_types": ("A100",),
    "gpu_memory": "40GB",
    "vendor": "amd",
    "link": Link.ANY,
    "required_node": "a",
    "labels_required": {"zone": "x"},
}
OTHER: dict[str, Any] = {
    "lease_id": "other",
    "preferred_node": "b",
    "types": TypeChoice.FIRST,
    "preemptible": False,
    "idle_below": 1.0,
    "idle_after_s": 9.0,
    "idle_action": "release",
    "on_idle": "requeue",
    "max_runtime_s": 600.0,
    "requeue_after_s": 300.0,
    "preempt_grace_s": 5.0,
    "preempt_signal": "USR2",
    "preemption_delay_s": 7.0,
    "priority": 9,
    "team": "vision",
    "owner": "ada",
    "ttl_s": 1.0,
    "expected_runtime_s": 5.0,
    "quarantine": True,
    "labels": {"a": "b"},
    "deadline_at": 8.0,
    "utility": Utility(1.0, 2.0),
}
GANG: dict[str, Any] = {"nodes": 2, "spread": Spread.PACK, "same": "rack", "prefer_same": "row"}


def test_the_shape_holds_what_decides_the_fit_and_no_more() -> None:
    """Caches of the allocator rest on it: equal shapes must fit the same nodes."""
    plain = Request("t", 1, resources={"cpus": 1})
    assert replace(plain, gpus=2).shape != plain.shape
    assert {field.name for field in fields(Request)} == PLACING.keys() | OTHER.keys() | GANG.keys() | {
        "shape",
        "is_particular",
        "is_linked",
    }
    for name, value in list(PLACING.items())[1:]:
        assert replace(plain, **{name: value}).shape != plain.shape, name
    assert replace(plain, **OTHER).shape == plain.shape
    assert replace(plain, **{**GANG, "nodes": 1}) == plain, "they make no difference to one node"
    for name, value in GANG.items():
        assert replace(plain, **{"nodes": 3, name: value}).shape != replace(plain, nodes=3).shape, name
    hash(replace(plain, **PLACING).shape)


def test_amounts_in_another_order_are_the_same_shape() -> None:
    one, other = ({"net": 2, "memory_mib": 4096.0}, {"memory_mib": 4096.0, "net": 2})
    assert Request("t", 1, resources=one).shape == Request("t", 1, resources=other).shape


def test_a_copy_for_another_task_differs_in_its_id_only() -> None:
    request = Request("t", **PLACING, **{name: value for name, value in OTHER.items() if name != "lease_id"})
    copy = request.for_task("u")
    assert copy == replace(request, lease_id="u")
    assert copy.shape == request.shape
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        request.for_task("")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((-1.0, 1.0), "utility"),
        ((1.0, -1.0), "target_s"),
        ((1.0, 1.0, math.inf), "sensitivity_per_s"),
        ((math.nan, 0.0), "utility"),
    ],
)
def test_a_wrong_utility_names_its_field(values: tuple[float, ...], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{said} must be a finite number of 0 or more") as caught:
        Utility(*values)
    assert caught.value.field == said


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 10), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_utility_never_grows_with_time_and_stays_in_its_range(
    priority: float, target: float, sensitivity: float, one: float, other: float
) -> None:
    utility = Utility(priority, target, sensitivity)
    early, late = utility.of(min(one, other)), utility.of(max(one, other))
    assert 0.0 <= late <= early <= priority
    assert utility.of(target) == priority / 2


def test_a_utility_is_exact_far_from_its_target() -> None:
    assert Utility(10.0, 1_000.0, 100.0).of(0.0) == 10.0
    assert Utility(10.0, 1_000.0, 100.0).of(1e12) == 0.0
    assert Utility(10.0, 1_000.0).of(1e12) == Utility(10.0, 1_000.0).of(0.0) == 5.0, "time does not matter"


def test_a_lease_shows_its_request_and_first_member() -> None:
    members = (Placement("a", (0, 1), ("GPU-1", "GPU-2"), 29_500), Placement("b", (3,)))
    lease = Lease(Request("t", 2), members, 7, 10.0)
    assert (lease.lease_id, lease.placement, lease.expires_at) == ("t", members[0], math.inf)
    assert PendingRequest(Request("w"), 1.0, 3).lease_id == "w"
    assert pickle.loads(pickle.dumps(lease)) == lease
    with pytest.raises(FrozenInstanceError):
        lease.quarantined = True  # type: ignore[misc]
