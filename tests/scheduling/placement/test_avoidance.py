"""The next try of a job that did not start avoids the server for ten minutes, if it could run elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import AgentLost, Change, Drained, Granted, Outcome, Released, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.refusal import RefusalKind
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import UnknownNodeError
from resource_manager.manager.explanations import explanation
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import POLICIES, get_policy
from resource_manager.scheduling.queue.orders import QueueDiscipline, get_order
from resource_manager.scheduling.queue.windows import avoided
from resource_manager.scheduling.reasons.feasibility import refusals_of
from resource_manager.scheduling.reasons.start_estimates import estimate_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import nodes

FIRST_FIT = get_policy("first_fit")
FIFO, BACKFILL = get_order("fifo"), get_order("fifo+backfill")
WHY = "ssh: the host key has changed"
AVOIDED = (
    "its start failed there at 1970-01-01T00:01Z: ssh: the host key has changed; avoided until "
    "1970-01-01T00:11Z"
)


def cluster_of(names: str, gpus: int = 4) -> ClusterState:
    return ClusterState(replace(node, address="10.0.0.1") for node in nodes(names, gpus=gpus))


def apply(cluster: ClusterState, changes: list[Change]) -> dict[str, list[str]]:
    """Apply the changes; return the servers of each lease that begins."""
    for change in changes:
        cluster.apply(change)
    return {
        change.lease.lease_id: [member.node for member in change.lease.members]
        for change in changes
        if isinstance(change, Granted)
    }


def submit(
    cluster: ClusterState, request: Request, now: float, order: QueueDiscipline = FIFO
) -> dict[str, list[str]]:
    return apply(cluster, allocator.submit(cluster, request, SchedulingPass(FIRST_FIT, order, now)))


def fail(cluster: ClusterState, lease_id: str, now: float = 90.0) -> None:
    """End a lease whose job did not start on any of its servers."""
    names = {member.node for member in cluster.leases[lease_id].members}
    released = lease_steps.release(cluster, lease_id, now, outcome="FAILED", reason=WHY, failed_nodes=names)
    apply(cluster, released)


def tried(cluster: ClusterState, request: Request, now: float = 90.0) -> ClusterState:
    """Return the cluster after a try of the request that did not start."""
    assert submit(cluster, request, 0.0)
    fail(cluster, request.lease_id, now)
    return cluster


def test_the_next_try_goes_elsewhere_and_other_requests_do_not_care() -> None:
    cluster = tried(cluster_of("abc"), Request("t", 2))
    assert submit(cluster, Request("t", 2), 91.0) == {"t": ["b"]}
    assert submit(cluster, Request("u", 2), 91.0) == {"u": ["a"]}


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"none"}))
def test_every_policy_keeps_away_from_it(policy: str) -> None:
    cluster = tried(cluster_of("ab"), Request("t", 1))
    changes = allocator.submit(cluster, Request("t", 1), SchedulingPass(get_policy(policy), FIFO, 91.0))
    assert apply(cluster, changes) == {"t": ["b"]}


def test_while_the_others_are_full_it_waits_and_the_reason_names_the_server_and_the_sentence() -> None:
    cluster = tried(cluster_of("ab"), Request("t", 4))
    submit(cluster, Request("runs", 4, required_node="b"), 90.0)
    assert submit(cluster, Request("t", 4), 100.0) == {}
    refusal = refusals_of(cluster, [cluster.pending["t"].request], SchedulingPass(FIRST_FIT, FIFO, 100.0))[
        "t"
    ]
    assert (refusal.kind, detail_of(refusal)) == (
        RefusalKind.NO_CAPACITY,
        f"no server with 4 GPUs: none is free anywhere; a has 4 free but is closed to it: {AVOIDED}",
    )
    answer = explanation(cluster, cluster.pending["t"].request, SchedulingPass(FIRST_FIT, FIFO, 100.0))
    assert [server["reasons"] for server in answer["servers"]] == [
        [AVOIDED],
        ["0 of 4 GPUs free, 4 requested"],
    ]
    assert apply(cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 689.0))) == {}
    assert apply(cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 690.0))) == {
        "t": ["a"]
    }


def test_a_try_that_is_queued_again_by_its_release_avoids_it_in_the_same_commit() -> None:
    cluster = cluster_of("ab")
    submit(cluster, Request("t", 1), 0.0)
    released = lease_steps.release(
        cluster, "t", 90.0, outcome=Outcome.NOT_STARTED, reason=WHY, failed_nodes=["a"]
    )
    assert apply(
        cluster, allocator.with_dispatch(cluster, released, SchedulingPass(FIRST_FIT, FIFO, 90.0))
    ) == {"t": ["b"]}


def test_a_server_that_alone_could_take_it_is_not_avoided() -> None:
    for cluster, request in (
        (cluster_of("a"), Request("t", 1)),
        (cluster_of("ab"), Request("t", 1, required_node="a")),
        (cluster_of("ab"), Request("t", 1, nodes=2)),
    ):
        tried(cluster, request)
        assert avoided(cluster, request, 91.0) == {}
        assert submit(cluster, request, 91.0)


def test_one_that_is_closed_could_take_it_some_day() -> None:
    """Better wait for ten minutes at most than fail there again."""
    cluster = tried(cluster_of("abc"), Request("t", 1))
    cluster.apply(Drained("b", 91.0))
    cluster.apply(AgentLost("c", 91.0, 31.0))
    assert submit(cluster, Request("t", 1), 92.0) == {}
    refusal = refusals_of(cluster, [cluster.pending["t"].request], SchedulingPass(FIRST_FIT, FIFO, 92.0))["t"]
    assert refusal.kind is RefusalKind.NO_CAPACITY
    assert detail_of(refusal) == (
        f"a has 4 free but is closed to it: {AVOIDED}; b has 4 free but is drained; "
        "c has 4 free but has been silent since 1970-01-01T00:00Z"
    )
    assert submit(cluster, Request("behind", 1), 93.0) == {"behind": ["a"]}, "it blocks nobody"


def test_a_gang_is_placed_without_the_server_that_failed() -> None:
    cluster = cluster_of("abc")
    gang = Request("g", 4, nodes=2)
    submit(cluster, gang, 0.0)
    apply(cluster, lease_steps.release(cluster, "g", 90.0, outcome="FAILED", failed_nodes=["b"]))
    assert submit(cluster, gang, 91.0) == {"g": ["a", "c"]}


def test_a_gang_that_avoids_a_server_does_not_keep_others_of_its_shape_from_it() -> None:
    cluster = cluster_of("abc")
    gang = Request("g", 4, nodes=2)
    submit(cluster, gang, 0.0)
    apply(cluster, lease_steps.release(cluster, "g", 90.0, outcome="FAILED", failed_nodes=["b"]))
    cluster.apply(Drained("a", 90.0))
    assert submit(cluster, gang, 91.0) == {}
    assert submit(cluster, Request("h", 4, nodes=2), 92.0) == {"h": ["b", "c"]}


def test_a_server_that_all_failed_on_is_tried_again() -> None:
    cluster = tried(cluster_of("ab"), Request("t", 1))
    submit(cluster, Request("t", 1), 100.0)
    fail(cluster, "t", 120.0)
    assert submit(cluster, Request("t", 1), 121.0) == {"t": ["a"]}


@pytest.mark.parametrize("order", [FIFO, BACKFILL])
def test_its_start_is_estimated_for_when_a_server_is_free_or_no_longer_avoided(
    order: QueueDiscipline,
) -> None:
    for runtime_s, at, node in ((300.0, 390.0, "b"), (None, 690.0, "a")):
        cluster = tried(cluster_of("ab"), Request("t", 4))
        submit(cluster, Request("runs", 4, required_node="b", expected_runtime_s=runtime_s), 90.0)
        submit(cluster, Request("t", 4), 100.0, order)
        start = estimate_starts(cluster, SchedulingPass(FIRST_FIT, order, 100.0))["t"]
        assert (start.at, start.node) == (at, node)


def test_backfill_reserves_the_time_from_which_it_is_no_longer_avoided() -> None:
    cluster = tried(cluster_of("ab"), Request("t", 4))
    submit(cluster, Request("runs", 4, required_node="b"), 90.0)
    submit(cluster, Request("t", 4, expected_runtime_s=60.0), 100.0, BACKFILL)
    assert submit(cluster, Request("long", 1, expected_runtime_s=600.0), 101.0, BACKFILL) == {}
    assert submit(cluster, Request("brief", 1, expected_runtime_s=500.0), 102.0, BACKFILL) == {"brief": ["a"]}


def test_backfill_reserves_servers_for_a_gang_from_then_on() -> None:
    cluster = cluster_of("abc")
    gang = Request("g", 4, nodes=2, expected_runtime_s=60.0)
    submit(cluster, gang, 0.0)
    apply(cluster, lease_steps.release(cluster, "g", 90.0, outcome="FAILED", failed_nodes=["a"]))
    submit(cluster, Request("runs", 4, required_node="b"), 90.0)
    submit(cluster, gang, 100.0, BACKFILL)
    assert submit(cluster, Request("long", 1, expected_runtime_s=600.0), 101.0, BACKFILL) == {}
    assert submit(cluster, Request("brief", 1, expected_runtime_s=500.0), 102.0, BACKFILL) == {"brief": ["a"]}


def test_a_request_ahead_of_others_of_its_shape_does_not_answer_for_them() -> None:
    cluster = tried(cluster_of("ab"), Request("t", 4))
    submit(cluster, Request("runs", 4, required_node="b"), 90.0)
    refusals = refusals_of(
        cluster, [Request("t", 4), Request("u", 4)], SchedulingPass(FIRST_FIT, FIFO, 100.0)
    )
    assert AVOIDED in detail_of(refusals["t"])
    assert AVOIDED not in detail_of(refusals["u"])


def test_no_lease_is_preempted_for_a_place_on_a_server_that_it_avoids() -> None:
    """And its search in vain does not end that of others of its shape."""
    cluster = tried(cluster_of("ab"), Request("t", 4, team="vision", priority=9))
    cluster.apply(TeamsChanged(Teams((Team("vision"),), preemption=True, min_runtime_s=0.0), 90.0))
    submit(cluster, Request("low", 4, team="vision", required_node="a"), 91.0)
    submit(cluster, Request("kept", 4, team="vision", required_node="b", priority=9), 91.0)
    for name in "tu":
        cluster.apply(allocator.enqueue(cluster, [Request(name, 4, team="vision", priority=9)], 92.0)[0])
    [change] = allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 689.0))
    assert (change.lease_id, change.preemptor) == ("low", "u")  # type: ignore[union-attr]


def test_a_release_refuses_unknown_servers_and_cuts_a_long_sentence() -> None:
    cluster = cluster_of("ab")
    submit(cluster, Request("t", 1), 0.0)
    with pytest.raises(UnknownNodeError, match="'z'"):
        lease_steps.release(cluster, "t", 1.0, failed_nodes=["a", "z"])
    [change] = lease_steps.release(cluster, "t", 1.0, reason="x" * 5000, failed_nodes=["b", "a", "b"])
    assert isinstance(change, Released)
    assert (len(change.reason), change.failed_nodes) == (239, ("b", "a"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("tuv"), st.integers(1, 4), st.booleans()), max_size=12),
    st.sampled_from((FIFO, BACKFILL)),
)
def test_no_grant_is_on_a_server_that_its_request_avoids(
    steps: list[tuple[str, int, bool]], order: QueueDiscipline
) -> None:
    cluster = cluster_of("abc")
    for place, (name, gpus, is_failed) in enumerate(steps):
        now = 100.0 * place
        if name in cluster.leases:
            failed = [member.node for member in cluster.leases[name].members] if is_failed else []
            changes = lease_steps.release(cluster, name, now, failed_nodes=failed)
            changes = allocator.with_dispatch(cluster, changes, SchedulingPass(FIRST_FIT, order, now))
        elif name in cluster.pending:
            changes = allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, order, now))
        else:
            changes = allocator.submit(cluster, Request(name, gpus), SchedulingPass(FIRST_FIT, order, now))
        for change in changes:
            if isinstance(change, Granted):
                request = change.lease.request
                assert not {m.node for m in change.lease.members} & avoided(cluster, request, now).keys()
            cluster.apply(change)
        allocator.check(cluster)
