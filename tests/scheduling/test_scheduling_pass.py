"""A pass carries the circumstances of a decision: what suspends grants, and what limits them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from resource_manager.core.changes import Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.refusal import RecoveryWindow, recovering
from resource_manager.core.teams import Team
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.preemption.victims import place_of
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.queue.windows import place_now
from resource_manager.scheduling.reasons.feasibility import refusals_of
from resource_manager.scheduling.reasons.start_estimates import estimate_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import nodes
from tests.scheduling.shared_cluster import Shared

PAUSE = recovering(RecoveryWindow(1.0, 59.0))
USUAL = SchedulingPass(POLICIES["first_fit"], get_order("fifo"), 5.0)
PAUSED = replace(USUAL, suspended=PAUSE)


def cluster_of(names: str) -> ClusterState:
    return ClusterState(replace(node, address=node.name) for node in nodes(names, 4))


def test_it_is_one_value_that_nobody_changes() -> None:
    with pytest.raises(FrozenInstanceError):
        USUAL.now = 6.0  # type: ignore[misc]
    assert replace(USUAL, suspended=PAUSE, now=5.0) == PAUSED != USUAL


@pytest.mark.parametrize(
    "request_",
    [Request("t", 1), Request("t", 1, preferred_node="b"), Request("t", 2, nodes=2), Request("t", 1, 500)],
    ids=["any", "preferred", "gang", "fraction"],
)
def test_while_grants_are_suspended_nothing_starts_that_would_start_else(request_: Request) -> None:
    cluster = cluster_of("ab")
    assert place_now(cluster, request_, PAUSED) is None
    assert allocator.allocate(cluster, request_, PAUSED) == []
    assert allocator.allocate_in_order(cluster, [request_], PAUSED) == []
    [queued] = allocator.submit(cluster, request_, PAUSED)
    assert isinstance(queued, Queued)
    cluster.apply(queued)
    assert place_of(cluster, PendingRequest(request_, 5.0, 1), PAUSED) is None
    assert allocator.schedule_pending(cluster, PAUSED) == []
    assert refusals_of(cluster, [request_], PAUSED) == {"t": PAUSE}
    assert estimate_starts(cluster, PAUSED)["t"].at is None
    assert len(allocator.schedule_pending(cluster, USUAL)) == 1


def test_while_grants_are_suspended_nothing_is_preempted() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="nlp")
    queued = allocator.enqueue(shared.state, [Request("mine", 4, team="vision")], shared.now)
    at = replace(USUAL, now=shared.now + 3600.0)
    assert allocator.with_dispatch(shared.state, queued, replace(at, suspended=PAUSE)) == queued
    assert len(allocator.with_dispatch(shared.state, queued, at)) == 2, "it would preempt else"
