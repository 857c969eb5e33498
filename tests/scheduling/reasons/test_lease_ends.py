"""When leases end: as expected, never before now, and by draws that reach all of a distribution."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.runtimes import LearntRuntimes
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling.reasons.lease_ends import MAX_PLAYS, DrawnEnds, expected_end, within_limit
from resource_manager.scheduling.reasons.runtime_quantiles import POINTS, RuntimeQuantiles

LEASE = Lease(Request("t", 1, expected_runtime_s=300.0), (Placement("gpu-server-0", (0,)),), 1, 0.0)
UNSTATED = replace(LEASE, request=Request("t", 1))


@pytest.mark.parametrize(
    ("lease", "now", "end"),
    [
        (LEASE, 10.0, 300.0),
        (LEASE, 1_000.0, 1_100.0),  # an overdue job goes on for a tenth
        (UNSTATED, 10.0, None),
        (replace(LEASE, quarantined=True), 10.0, None),
        (replace(UNSTATED, preempted_by="x", preempt_until=70.0), 10.0, 70.0),
        (replace(UNSTATED, preempted_by="x", preempt_until=70.0), 80.0, 80.0),
    ],
)
def test_an_expected_end_is_by_the_runtime_and_never_before_now(
    lease: Lease, now: float, end: float | None
) -> None:
    assert expected_end(lease, now, ClusterState()) == end


@pytest.mark.parametrize(
    ("lease", "end"),
    [
        (LEASE, 300.0),
        (replace(LEASE, request=replace(LEASE.request, max_runtime_s=200.0)), 200.0),
        (replace(LEASE, request=replace(LEASE.request, requeue_after_s=400.0)), 300.0),
        (replace(UNSTATED, request=replace(UNSTATED.request, requeue_after_s=200.0)), 200.0),
        (UNSTATED, None),
    ],
)
def test_a_lease_ends_at_its_limit_whatever_runtime_is_expected_or_drawn(
    lease: Lease, end: float | None
) -> None:
    known = expected_end(lease, 10.0, ClusterState())
    assert within_limit(None, lease, known, 10.0) == end
    assert within_limit(None, lease, known, 250.0) == (end and max(end, 250.0))
    drawn = drawn_ends(lease, *(300.0,) * (POINTS + 1) if known else ())
    assert [each for each, _ in drawn.running()] == [pytest.approx(end)]


def drawn_ends(lease: Lease, *quantiles_s: float) -> DrawnEnds:
    cluster = ClusterState(default_inventory())
    cluster.apply(Granted(lease, lease.granted_at))
    quantiles = RuntimeQuantiles(tuple(map(math.log, quantiles_s))) if quantiles_s else None
    return DrawnEnds(cluster, (), lambda request: quantiles, random.Random(0).random, 0.0)


def test_a_job_that_was_preempted_goes_on_from_where_it_was() -> None:
    lease = replace(LEASE, request=replace(LEASE.request, labels={"ran_s": "200"}))
    drawn = drawn_ends(lease, *(300.0,) * (POINTS + 1))
    assert [end for end, _ in drawn.running()] == [pytest.approx(100.0)]
    assert drawn(lease, 0.0) == pytest.approx(100.0), "as one that begins in a play"
    assert expected_end(lease, 10.0, ClusterState()) == 100.0
    late = expected_end(lease, 800.0, ClusterState())
    assert late == 900.0, "longer than expected by a tenth of what it took"


def test_a_quarantined_lease_is_no_run_that_goes_on() -> None:
    """Days after a server died, the tasks that ran there were expected to take days."""
    runtimes = RuntimeQuantiles((*[math.log(600.0)] * POINTS, math.log(660.0)))

    def ends(*quarantined: Lease) -> list[float]:
        cluster = ClusterState(default_inventory())
        cluster.runtimes = LearntRuntimes({"t": (600.0,) * 5})
        for lease in (UNSTATED, *quarantined):
            cluster.apply(Granted(lease, lease.granted_at))
        drawn = DrawnEnds(cluster, (), lambda request: runtimes, random.Random(0).random, 0.0)
        return [end for _ in range(MAX_PLAYS) for end, _ in drawn.running() if end is not None]

    days_ago = replace(UNSTATED, granted_at=-259_200.0, quarantined=True)
    dead = [
        replace(days_ago, request=Request(f"t#{gpu}", 1), members=(Placement("gpu-server-1", (gpu,)),))
        for gpu in range(8)
    ]
    assert ends(*dead) == ends()


def test_over_the_plays_an_end_is_drawn_from_each_part_of_its_distribution() -> None:
    drawn = drawn_ends(LEASE, *(100.0 + 10 * point for point in range(POINTS + 1)))
    ends = sorted(end for _ in range(MAX_PLAYS) for end, _ in drawn.running() if end is not None)
    assert drawn.vary
    assert len(ends) == MAX_PLAYS
    assert ends[0] < 100 + 2 * 200 / MAX_PLAYS
    assert ends[-1] > 300 - 2 * 200 / MAX_PLAYS
    assert all(later - earlier < 3 * 200 / MAX_PLAYS for earlier, later in pairwise(ends))


def test_certain_and_unknown_ends_do_not_vary() -> None:
    certain = drawn_ends(LEASE, *[300.0] * (POINTS + 1))
    assert not certain.vary
    assert [end for end, _ in certain.running()] == [pytest.approx(300.0)]
    unknown = drawn_ends(replace(LEASE, quarantined=True), *map(float, range(1, POINTS + 2)))
    assert not unknown.vary
    assert [end for end, _ in unknown.running()] == [None]
