"""Leases given back before their jobs began: the place of their requests, and the runtime they used."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager.core.changes import MaintenanceChanged, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling.queue.giving_back import (
    GIVEN_BACK,
    SOON_S,
    given_back,
)
from resource_manager.scheduling.queue.runtime_limits import PREEMPTED_AFTER, RUNTIME_USED, lease_end
from tests.builders import node


def cluster_with(*changes: Any) -> ClusterState:
    cluster = ClusterState([node("a")])
    for change in changes:
        cluster.apply(change)
    return cluster


def lease(request: Request, granted_at: float = 100.0) -> Lease:
    return Lease(request, (Placement("a", (0,)),), 1, granted_at, granted_at + 60, queued_at=40.0, sequence=3)


@pytest.mark.parametrize(
    ("labels", "after_s", "keeps"),
    [
        ({}, 0.0, True),
        ({}, SOON_S, True),
        ({}, SOON_S + 1, False),
        ({GIVEN_BACK: "1"}, 0.0, False),
        ({GIVEN_BACK: "odd"}, 0.0, True),
        ({GIVEN_BACK: "²"}, 0.0, True),
    ],
)
def test_the_old_place_is_kept_once_and_soon(labels: dict[str, str], after_s: float, keeps: bool) -> None:
    cluster, now = cluster_with(), 100.0 + after_s
    (queued,) = given_back(cluster, lease(Request("t", 1, labels={**labels, PREEMPTED_AFTER: "50"})), now)
    place = (queued.queued_at, queued.sequence)
    assert place == ((40.0, 3) if keeps else (now, cluster.sequence + 1))
    assert queued.request.labels[GIVEN_BACK] in ("1", "2")
    assert (PREEMPTED_AFTER in queued.request.labels) == keeps, "one that arrives again waits from then on"


def test_what_would_run_into_maintenance_keeps_its_place_as_often_as_it_is_given_back() -> None:
    window = Window(1, ("a",), 1000.0, 2000.0)
    cluster = cluster_with(MaintenanceChanged((window,), 0.0))
    request = Request("t", 1, labels={GIVEN_BACK: "5"}, expected_runtime_s=600.0)
    (queued,) = given_back(cluster, lease(request), 500.0)
    assert (queued.queued_at, queued.request.labels) == (40.0, {GIVEN_BACK: "5"})
    (queued,) = given_back(cluster, lease(request), 300.0)  # its job would end before
    assert queued.queued_at == 300.0
    limited = Request("t", 1, expected_runtime_s=8 * 86_400.0, max_runtime_s=600.0)
    found = {now: given_back(cluster, lease(limited), now)[0].queued_at for now in (400.0, 401.0)}
    assert found == {400.0: 400.0, 401.0: 40.0}


def test_the_runtime_used_counts_for_the_longest_of_the_team() -> None:
    cluster = cluster_with(TeamsChanged(Teams((Team("short", max_runtime_s=100.0),)), 0.0))
    assert cluster.ledger is not None
    (queued,) = given_back(cluster, lease(Request("t", 1, team="short")), 130.5)
    assert queued.request.labels[RUNTIME_USED] == "31"
    assert (
        lease_end(cluster.ledger, queued.request, 200.0, 200.0, queued.request.ttl_s) == 234.5
    )  # half of what is left
    assert given_back(cluster, lease(queued.request, 200.0), 270.0) == []
