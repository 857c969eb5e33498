"""Service that a job attained with leases that did not end it: a part of the state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core import attained_service
from resource_manager.core.attained_service import MAX_JOBS
from resource_manager.core.changes import Expired, Granted, MembersReleased, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from tests.builders import nodes


def grant(cluster: ClusterState, request: Request, *members: Placement) -> int:
    token = cluster.last_fencing_token + 1
    members = members or (Placement("a", tuple(range(request.gpus))),)
    cluster.apply(Granted(Lease(request, members, token, 100.0), 100.0))
    return token


def run(cluster: ClusterState, lease_id: str, seconds: float, outcome: str = "SUCCESS") -> None:
    token = grant(cluster, Request(lease_id, 2))
    cluster.apply(Released(lease_id, token, 100.0 + seconds, outcome))


@pytest.fixture
def cluster() -> ClusterState:
    return ClusterState(nodes("ab", gpus=2))


def test_leases_that_did_not_succeed_add_to_the_service_of_their_job(cluster: ClusterState) -> None:
    run(cluster, "t", 100.0, "FAILED")
    run(cluster, "other", 7.0, "FAILED")
    run(cluster, "t", 50.0, "PREEMPTED")
    run(cluster, "t#3", 0.25, "FAILED")  # as a replay names the third lease; it counts as a second
    assert cluster.attained == {"other": 14_000, "t": 302_000}


@pytest.mark.parametrize("outcome", ["SUCCESS", ""])
def test_the_next_job_of_the_same_name_starts_without_service(cluster: ClusterState, outcome: str) -> None:
    run(cluster, "t", 100.0, "FAILED")
    run(cluster, "t", 1.0, outcome)
    assert cluster.attained == {}


def test_an_expired_lease_and_a_gpu_fraction_count_as_service(cluster: ClusterState) -> None:
    token = grant(cluster, Request("t", 1, 500))
    cluster.apply(Expired("t", token, 700.0))
    assert cluster.attained == {"t": 300_000}


def test_a_gang_counts_once_with_all_members_when_the_first_of_them_ends(cluster: ClusterState) -> None:
    token = grant(cluster, Request("t", 2, nodes=2), Placement("a", (0, 1)), Placement("b", (0, 1)))
    for rank, at in enumerate((110.0, 500.0)):
        cluster.apply(MembersReleased("t", token, (rank,), at))
    assert cluster.attained == {"t": 40_000}


def test_attained_service_is_bounded_in_jobs(cluster: ClusterState) -> None:
    names = [f"t{number}" for number in range(MAX_JOBS)]
    for name in (*names, "t0", "new"):
        run(cluster, name, 10.0, "FAILED")
    assert [*cluster.attained] == [*names[2:], "t0", "new"], "t1 attained longest ago"
    assert (cluster.attained["t0"], cluster.attained["new"]) == (40_000, 20_000)


RUNS = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(("FAILED", "SUCCESS", ""))), max_size=6)


@given(RUNS, RUNS)
def test_a_trial_adds_nothing_and_a_snapshot_keeps_all(
    before: list[tuple[str, str]], tried: list[tuple[str, str]]
) -> None:
    cluster = ClusterState(nodes("a", gpus=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attained_service, "MAX_JOBS", 3)
        for name, outcome in before:
            run(cluster, name, 5.0, outcome)
        known = list(cluster.attained.items())
        with cluster.trial():
            for name, outcome in tried:
                run(cluster, name, 7.0, outcome)
        assert list(cluster.attained.items()) == known
        again = ClusterState.from_snapshot(cluster.snapshot())
        assert list(again.attained.items()) == known
