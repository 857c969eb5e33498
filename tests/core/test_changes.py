"""Changes: values that never change themselves, and of which every one is applied by the state."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import get_args

import pytest

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Cancelled,
    Change,
    ClusterSettingsChanged,
    DeadlineRisk,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    JobPlaced,
    MaintenanceChanged,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
    TeamsChanged,
    Withdrawn,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.maintenance import Window
from resource_manager.core.models import JobPlace, Lease, Placement, Request
from resource_manager.core.teams import Team, Teams
from tests.builders import nodes

LEASE = Lease(Request("t", 1), (Placement("a", (0,)),), 1, 0.0, 60.0)
GANG = (Placement("a", (0,), port=29500), Placement("b", (0,)))
STEPS: list[Change] = [
    Queued(Request("t", 1), 0.0, 1, 0.0),
    Granted(LEASE, 1.0),
    JobPlaced("t", 1, (JobPlace("ssh", "a:22", "gpu", "m1 a", "/home/u/jobs", "f00d", "u"),), 1.2),
    Preempting("t", 1, "u", 80.0, 1.5),
    Renewed("t", 1, 2.0, 90.0),
    Quarantined("t", 1, 90.0, revoked=True),
    Released("t", 1, 91.0, Outcome.SUCCESS, reason="seen to be gone", failed_nodes=("a",)),
    Granted(Lease(Request("u", 1), (Placement("a", (0,)),), 2, 92.0, 93.0), 92.0),
    Expired("u", 2, 93.0),
    Queued(Request("w", 1), 94.0, 2, 94.0),
    DeadlineRisk("w", 94.5, 96.0),
    Announced(Request("d/r/t", 2), 94.6, ("d/r/s",), 20),
    Withdrawn("d/r/t", 94.7, "the run has ended"),
    Cancelled("w", 95.0, "no longer needed"),
    Drained("a", 96.0, "fan", failed=True),
    Resumed("a", 97.0),
    AgentSeen("a", 97.1),
    GpuClosed("a", 1, "GPU-1", "xid 79", 97.2, stop=True),
    GpuOpened("a", 1, 97.3),
    GpuCleaned("a", 1, 2, 97.4, 0.25, 1.5),
    AgentLost("a", 97.5, 37.25),
    ClusterSettingsChanged(ClusterSettings("fgd", min_gpus=0), 97.6),
    MaintenanceChanged((Window(1, ("s1",), 100.5, 200.0),), 98.0),
    TeamsChanged(Teams((Team("vision", 1),)), 98.0),
    InventoryChanged(nodes("abc"), 99.0),
    Granted(Lease(Request("g", 1, nodes=2), GANG, 3, 99.0), 99.0),
    MembersReleased("g", 3, (0,), 100.0),
    MembersReleased("g", 3, (1,), 101.0, "FAILED"),
]


def test_the_steps_have_a_change_of_every_kind() -> None:
    assert {type(step) for step in STEPS} == set(get_args(Change))


def test_every_change_raises_the_version_by_one() -> None:
    """One and only one: clients name the state that they decided on by its version."""
    state = ClusterState(nodes("ab"))
    for version, step in enumerate(STEPS, 1):
        state.apply(step)
        assert state.version == version, step
    assert (dict(state.leases), dict(state.pending), len(state.nodes)) == ({}, {}, 3)


@pytest.mark.parametrize("change", STEPS, ids=lambda change: type(change).__name__)
def test_a_change_has_a_time_and_cannot_be_changed(change: Change) -> None:
    assert change.at >= 0.0
    assert not hasattr(change, "__dict__"), "slots: millions are kept at once"
    with pytest.raises(FrozenInstanceError):
        change.at = 0.0  # type: ignore[misc]
    assert type(change)(**{field.name: getattr(change, field.name) for field in fields(change)}) == change


def test_an_outcome_is_the_text_that_the_history_has() -> None:
    texts = ["SUCCESS", "FAILED", "CANCELLED", "PREEMPTED", "NOT_STARTED", "EVICTED"]
    texts += ["IDLE", "TIMED_OUT"]
    assert [str(outcome) for outcome in Outcome] == texts
    assert Released("t", 1, 0.0, Outcome.FAILED) == Released("t", 1, 0.0, "FAILED")
    assert Released("t", 1, 0.0).outcome == ""
