"""Failed starts in the state: by lease id, for ten minutes, bounded, undone by trials."""

from __future__ import annotations

from resource_manager.core.changes import Granted, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import (
    AVOIDED_S,
    MAX_FAILED_STARTS,
    avoided_until,
    by_lease,
    by_time,
    with_failed_start,
)
from resource_manager.core.models import Lease, Placement, Request
from tests.builders import nodes


def failed(lease_id: str, at: float, *names: str, token: int = 1) -> Released:
    return Released(lease_id, token, at, "FAILED", reason="no route to host", failed_nodes=names or ("a",))


def started(cluster: ClusterState, lease_id: str, token: int) -> None:
    cluster.apply(Granted(Lease(Request(lease_id, 1), (Placement("a", (0,)),), token, 0.0), 0.0))


def test_a_release_that_names_failed_nodes_is_remembered_by_its_lease_id() -> None:
    cluster = ClusterState(nodes("ab", gpus=2))
    for token, change in enumerate((failed("t", 10.0), failed("t", 20.0, "b", token=2)), start=1):
        started(cluster, "t", token)
        cluster.apply(change)
    started(cluster, "u", 3)
    cluster.apply(Released("u", 3, 30.0, reason="its user ended it"))
    assert cluster.failed_starts == {"t": (failed("t", 10.0), failed("t", 20.0, "b", token=2))}
    assert ClusterState.from_snapshot(cluster.snapshot()).failed_starts == cluster.failed_starts
    assert avoided_until(failed("t", 10.0)) == 10.0 + AVOIDED_S


def test_a_trial_forgets_it() -> None:
    cluster = ClusterState(nodes("a", gpus=2))
    started(cluster, "t", 1)
    with cluster.trial():
        cluster.apply(failed("t", 10.0))
        assert "t" in cluster.failed_starts
    assert cluster.failed_starts == {}
    assert "t" in cluster.leases


def test_what_is_over_goes_with_the_next_one() -> None:
    known = with_failed_start({}, failed("t", 10.0))
    assert list(with_failed_start(known, failed("u", 9.9 + AVOIDED_S, token=2))) == ["t", "u"]
    assert list(with_failed_start(known, failed("u", 10.0 + AVOIDED_S, token=2))) == ["u"]


def test_only_the_newest_are_remembered() -> None:
    known = by_lease(failed(f"t{n}", float(n), token=n) for n in range(MAX_FAILED_STARTS))
    assert len(by_time(known)) == MAX_FAILED_STARTS
    after = with_failed_start(known, failed("new", 300.0, token=1000))
    assert [entry.lease_id for entry in by_time(after)] == [
        *(f"t{n}" for n in range(1, MAX_FAILED_STARTS)),
        "new",
    ]
