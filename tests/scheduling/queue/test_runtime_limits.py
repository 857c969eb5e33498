"""Longest runtimes: of requests and teams, told in time, and what becomes of the lease and its request."""

from __future__ import annotations

import math
from typing import Any

import pytest

from resource_manager.core.changes import JobEnd, JobPlaced, Outcome, Preempting, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import IDLE, MAX_RUNTIME, REQUEUE_AFTER
from resource_manager.core.models import JobPlace, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import InvalidRequestError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.queue.runtime_limits import limit_of, preempted_at_limit
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import node


def running(team_s: float | None = None, *, placed: bool = True, **fields: Any) -> ClusterState:
    """A cluster on which the job `x` was granted at 10 s."""
    cluster = ClusterState([node("a")])
    if team_s is not None:
        cluster.apply(TeamsChanged(Teams((Team("vision", max_runtime_s=team_s),)), 0.0))
    request = Request("x", 1, team="vision", **fields)
    current = SchedulingPass(get_policy("first_fit"), get_order("fifo"), 10.0)
    apply(cluster, allocator.submit(cluster, request, current))
    if placed:
        token = cluster.leases["x"].fencing_token
        cluster.apply(JobPlaced("x", token, (JobPlace("ssh"),), 10.0))
    return cluster


def apply(cluster: ClusterState, changes: Any) -> None:
    for change in changes:
        cluster.apply(change)


def expire(cluster: ClusterState, now: float) -> list[str]:
    changes = lease_steps.expire(cluster, now)
    apply(cluster, changes)
    return [type(change).__name__ for change in changes]


@pytest.mark.parametrize(
    ("team_s", "own_s", "again_s", "limit"),
    [
        (None, None, None, (math.inf, MAX_RUNTIME)),
        (900.0, None, None, (900.0, MAX_RUNTIME)),
        (900.0, 600.0, None, (600.0, MAX_RUNTIME)),
        (500.0, 600.0, None, (500.0, MAX_RUNTIME)),
        (None, 600.0, 300.0, (300.0, REQUEUE_AFTER)),
        (600.0, None, 600.0, (600.0, REQUEUE_AFTER)),
        (500.0, None, 600.0, (500.0, MAX_RUNTIME)),
    ],
)
def test_the_shortest_limit_counts(
    team_s: float | None, own_s: float | None, again_s: float | None, limit: tuple[float, str]
) -> None:
    cluster = running(team_s, max_runtime_s=own_s, requeue_after_s=again_s)
    assert limit_of(cluster.ledger, cluster.leases["x"].request) == limit


def test_a_job_is_told_in_time_to_be_gone_at_the_limit_and_does_not_wait_again() -> None:
    cluster = running(max_runtime_s=600.0, preempt_grace_s=60.0, ttl_s=1000.0)
    assert cluster.leases["x"].expires_at == 550.0
    assert expire(cluster, 549.0) == []
    assert expire(cluster, 550.0) == ["Renewed", "Preempting"]
    lease = cluster.leases["x"]
    assert (lease.preempted_by, lease.preempt_until, lease.expires_at) == (MAX_RUNTIME, 610.0, 610.0)
    assert expire(cluster, 609.0) == []
    released, *more = lease_steps.release(
        cluster, "x", 590.0, outcome=Outcome.PREEMPTED, job_end=JobEnd.ENDED
    )
    assert (released.outcome, more) == (Outcome.TIMED_OUT, [])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("limit", "on_idle", "ended", "outcome"),
    [
        (MAX_RUNTIME, "end", Outcome.FAILED, Outcome.TIMED_OUT),
        (IDLE, "end", Outcome.FAILED, Outcome.IDLE),
        (IDLE, "end", Outcome.SUCCESS, Outcome.SUCCESS),
        (IDLE, "requeue", Outcome.FAILED, Outcome.FAILED),
        (REQUEUE_AFTER, "end", Outcome.FAILED, Outcome.FAILED),
    ],
)
def test_a_task_that_fails_as_a_limit_ends_it_has_the_outcome_of_the_limit(
    limit: str, on_idle: str, ended: Outcome, outcome: Outcome
) -> None:
    """As one of `with_gpus` does, in a worker; nothing waits again by that."""
    cluster = running(placed=False, on_idle=on_idle, ttl_s=1000.0)
    apply(cluster, preempted_at_limit(cluster.ledger, cluster.leases["x"], limit, 100.0))
    released, *more = lease_steps.release(cluster, "x", 120.0, outcome=ended)
    assert (released.outcome, more) == (outcome, [])  # type: ignore[union-attr]


def test_a_job_gives_its_gpus_back_after_its_turn_and_waits_behind_others() -> None:
    cluster = running(requeue_after_s=600.0, ttl_s=1000.0)
    assert expire(cluster, 550.0) == ["Renewed", "Preempting"]
    _, queued = lease_steps.release(cluster, "x", 590.0, outcome=Outcome.PREEMPTED, job_end=JobEnd.ENDED)
    assert (queued.queued_at, queued.sequence) == (590.0, 2)  # type: ignore[union-attr]
    assert queued.request.labels["restart_count"] == "1"  # type: ignore[union-attr]
    assert "preempted_after_s" not in queued.request.labels  # type: ignore[union-attr]


def test_a_renewal_does_not_extend_the_limit_but_the_time_that_a_told_job_has() -> None:
    cluster = running(max_runtime_s=600.0, ttl_s=100.0)
    for now, end in ((100.0, 200.0), (500.0, 550.0)):
        [renewed] = lease_steps.renew(cluster, "x", now)
        assert renewed.expires_at == end  # type: ignore[union-attr]
        cluster.apply(renewed)
    expire(cluster, 560.0)
    [renewed] = lease_steps.renew(cluster, "x", 600.0)
    assert renewed.expires_at == 700.0  # type: ignore[union-attr]
    cluster.apply(renewed)
    assert expire(cluster, 621.0) == ["Quarantined"]


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_lease_preempted_for_a_request_has_the_grace_it_was_told_though_its_limit_comes_first(
    is_renewed: bool,
) -> None:
    cluster = running(max_runtime_s=1800.0, preempt_grace_s=600.0, ttl_s=900.0, placed=False)
    apply(cluster, lease_steps.renew(cluster, "x", 900.0))
    assert cluster.leases["x"].expires_at == 1210.0, "its limit would be told then"
    token = cluster.leases["x"].fencing_token
    cluster.apply(Preempting("x", token, "mine", 1510.0, 910.0))
    if is_renewed:
        apply(cluster, lease_steps.renew(cluster, "x", 1200.0))
        assert cluster.leases["x"].expires_at == 2100.0
        assert expire(cluster, 1210.0) == []
        return
    assert expire(cluster, 1210.0) == ["Renewed"]
    assert expire(cluster, 1509.0) == []
    assert expire(cluster, 1510.0) == ["Expired"]


def test_no_limit_extends_a_preemption_that_is_over() -> None:
    cluster = running(max_runtime_s=600.0, ttl_s=1000.0, placed=False)
    cluster.apply(Preempting("x", cluster.leases["x"].fencing_token, "mine", 540.0, 480.0))
    assert expire(cluster, 550.0) == ["Expired"]


def test_what_placed_no_job_ends_with_its_preemption_and_what_is_not_renewed_before() -> None:
    cluster = running(max_runtime_s=600.0, ttl_s=1000.0, placed=False)
    assert expire(cluster, 550.0) == ["Renewed", "Preempting"]
    [renewed] = lease_steps.renew(cluster, "x", 555.0)
    assert renewed.expires_at == 610.0  # type: ignore[union-attr]
    assert expire(cluster, 610.0) == ["Expired"]
    cluster = running(max_runtime_s=600.0, ttl_s=100.0, placed=False)
    assert expire(cluster, 110.0) == ["Expired"]


def test_a_lease_whose_owner_falls_silent_after_it_was_told_keeps_its_gpus_for_its_ttl_alone() -> None:
    cluster = running(max_runtime_s=600.0, preempt_grace_s=300.0, ttl_s=100.0, placed=False)
    for now in (100.0, 190.0, 280.0):
        apply(cluster, lease_steps.renew(cluster, "x", now))
    assert expire(cluster, 310.0) == ["Renewed", "Preempting"]
    apply(cluster, lease_steps.renew(cluster, "x", 320.0))
    assert expire(cluster, 419.0) == []
    assert expire(cluster, 420.0) == ["Expired"]


@pytest.mark.parametrize("name", ["max_runtime_s", "requeue_after_s"])
@pytest.mark.parametrize("value", [60.0, 1.0, -5.0, math.inf, math.nan])
def test_a_limit_within_the_grace_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match="must be above preempt_grace_s"):
        Request("x", 1, **{name: value})  # type: ignore[arg-type]
