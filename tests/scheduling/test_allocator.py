"""Pure allocation steps: the changes that each returns for a state, which it leaves unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest

from resource_manager.core.changes import (
    Change,
    Drained,
    Granted,
    InventoryChanged,
    Outcome,
    Queued,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Lease, Node, Placement, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import (
    CapacityError,
    DuplicateTaskError,
    NeverFitsError,
    UnknownNodeError,
)
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.placement.policies import POLICIES, select_placement
from resource_manager.scheduling.queue.orders import QueueDiscipline, fifo, get_order
from resource_manager.scheduling.scheduling_pass import Limits, SchedulingPass
from tests.builders import node, nodes

FIRST_FIT = POLICIES["first_fit"]
FIFO = get_order("fifo")
BACKFILL = get_order("fifo+backfill")
PRIORITY = get_order("priority+backfill")


@pytest.fixture
def cluster() -> Iterator[ClusterState]:
    """Nodes a and b in a state that only `move` may change, which is checked after the test."""
    cluster = Untouched(nodes("ab", 4, 16))
    yield cluster
    assert in_order(cluster) == cluster.expected


def in_order(cluster: ClusterState) -> Snapshot:
    """Return the snapshot with leases and queue sorted by number, as a state guarantees no order."""
    snapshot = cluster.snapshot()
    return replace(
        snapshot,
        leases=tuple(sorted(snapshot.leases, key=lambda lease: lease.fencing_token)),
        pending=tuple(sorted(snapshot.pending, key=lambda pending: pending.sequence)),
    )


class Untouched(ClusterState):
    """State that records its expected snapshot after each `move`."""

    expected: Snapshot

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__(nodes)
        self.expected = in_order(self)

    def move(self, *changes: Change) -> None:
        for change in changes:
            self.apply(change)
        self.expected = in_order(self)


def held(task_id: str, on: str, gpus: int = 4, *, token: int = 1, **more: object) -> Granted:
    request = Request(task_id, gpus, **more)  # type: ignore[arg-type]
    lease = Lease(request, (Placement(on, tuple(range(gpus))),), token, 0.0, request.ttl_s)
    return Granted(lease, 0.0)


def kinds(changes: list[Change]) -> list[tuple[str, str]]:
    """Return (kind, task id) of each change."""
    return [
        (
            type(change).__name__,
            change.lease.lease_id
            if isinstance(change, Granted)
            else change.request.lease_id
            if isinstance(change, Queued)
            else change.lease_id,  # type: ignore[union-attr]
        )
        for change in changes
    ]


def admits_all_but(*task_ids: str) -> Limits:
    @dataclass(frozen=True, slots=True)
    class Choosy:
        def admits(
            self, cluster: ClusterState, request: Request, members: Members, queued_at: float, now: float
        ) -> bool:
            assert members[0].node in cluster.by_name
            assert queued_at <= now
            return request.lease_id not in task_ids

    return Limits(Choosy())  # type: ignore[arg-type]


# ---- selection of a placement ----


def test_the_preferred_node_comes_before_the_policys_choice(cluster: Untouched) -> None:
    assert select_placement(cluster, Request("t", 1), FIRST_FIT) == Placement("a", (0,))
    assert select_placement(cluster, Request("t", 1, preferred_node="b"), FIRST_FIT) == Placement("b", (0,))
    assert select_placement(cluster, Request("t", 1, preferred_node="x"), FIRST_FIT) == Placement("a", (0,))
    cluster.move(held("full", "b"))
    assert select_placement(cluster, Request("t", 1, preferred_node="b"), FIRST_FIT) == Placement("a", (0,))


# ---- grants ----


def test_a_grant_sets_every_field_of_the_lease(cluster: Untouched) -> None:
    cluster.move(held("other", "a", token=7), Queued(Request("t", 2, ttl_s=60.0), 3.0, 1, 3.0))
    request = Request("t", 2, ttl_s=60.0)
    granted = allocator.grant(cluster, request, (Placement("b", (0, 1)),), 5.0)
    lease = Lease(
        request, (Placement("b", (0, 1)),), 8, granted_at=5.0, expires_at=65.0, queued_at=3.0, sequence=1
    )
    assert granted == Granted(lease, 5.0)
    other = Request("u", 2)
    granted = allocator.grant(cluster, other, (Placement("b", (0, 1)),), 5.0)
    assert granted.lease == Lease(other, (Placement("b", (0, 1)),), 8, 5.0, math.inf, None, sequence=2)


def test_allocate_grants_a_request_that_fits_and_returns_nothing_otherwise(cluster: Untouched) -> None:
    assert allocator.allocate(cluster, Request("t", 5), SchedulingPass(FIRST_FIT, fifo, 1.0)) == []
    (granted,) = allocator.allocate(cluster, Request("t", 4), SchedulingPass(FIRST_FIT, fifo, 1.0))
    assert granted == allocator.grant(cluster, Request("t", 4), (Placement("a", (0, 1, 2, 3)),), 1.0)


@pytest.mark.parametrize("rules", [Teams(), Teams((Team("vision", 2),))], ids=["no teams", "teams"])
def test_leases_granted_at_once_and_given_back_wait_in_the_order_of_their_arrival(rules: Teams) -> None:
    cluster = ClusterState(nodes("a", 4))
    cluster.apply(TeamsChanged(rules, 0.0))

    def apply(changes: Iterable[Change]) -> None:
        for change in changes:
            cluster.apply(change)

    batch = [Request("first", 1), Request("second", 1)]
    apply(allocator.allocate_in_order(cluster, batch, SchedulingPass(FIRST_FIT, FIFO, 1.0)))
    apply(allocator.submit(cluster, Request("third", 2), SchedulingPass(FIRST_FIT, FIFO, 2.0)))
    apply(allocator.submit(cluster, Request("waits", 4), SchedulingPass(FIRST_FIT, FIFO, 3.0)))
    for name in ("third", "second", "first"):
        apply(lease_steps.release(cluster, name, 4.0, outcome=Outcome.NOT_STARTED))
    assert [entry.lease_id for entry in FIFO(cluster, 4.0)] == ["first", "second", "third", "waits"]
    assert [entry.sequence for entry in FIFO(cluster, 4.0)] == [1, 2, 3, 4]


def test_a_refused_request_does_not_change_who_is_granted_beside_it() -> None:
    """`urgent` would have a reservation on b if it waited, and `small` then its place on a."""
    cluster = ClusterState(nodes("ab", 4))
    for name, gpus, node_name, runtime_s in (("x", 3, "a", 90.0), ("y", 3, "b", 50.0)):
        request = Request(name, gpus, required_node=node_name, expected_runtime_s=runtime_s)
        cluster.apply(*allocator.submit(cluster, request, SchedulingPass(FIRST_FIT, PRIORITY, 0.0)))
    waits = Request("waits", 4, required_node="a", expected_runtime_s=60.0)
    cluster.apply(*allocator.submit(cluster, waits, SchedulingPass(FIRST_FIT, PRIORITY, 0.0)))
    small = Request("small", 1, preferred_node="b", expected_runtime_s=60.0)
    urgent = Request("urgent", 4, required_node="b", priority=9, expected_runtime_s=60.0)
    alone = allocator.allocate_in_order(cluster, [small], SchedulingPass(FIRST_FIT, PRIORITY, 1.0))
    beside = allocator.allocate_in_order(cluster, [urgent, small], SchedulingPass(FIRST_FIT, PRIORITY, 1.0))
    assert beside == alone
    (granted,) = alone
    assert isinstance(granted, Granted)
    assert granted.lease.placement.node == "b"


def test_a_grant_beside_the_queue_takes_a_number_that_no_later_request_gets() -> None:
    cluster = ClusterState(nodes("a", 4))
    for name, gpus in (("runs", 2), ("waits", 4)):
        request = Request(name, gpus, expected_runtime_s=60.0)
        cluster.apply(*allocator.submit(cluster, request, SchedulingPass(FIRST_FIT, BACKFILL, 0.0)))
    asked = [Request("large", 4, expected_runtime_s=9.0), Request("small", 1, expected_runtime_s=9.0)]
    (granted,) = allocator.allocate_in_order(cluster, asked, SchedulingPass(FIRST_FIT, BACKFILL, 1.0))
    assert isinstance(granted, Granted)
    cluster.apply(granted)
    (queued,) = allocator.enqueue(cluster, [Request("later", 1)], 2.0)
    assert isinstance(queued, Queued)
    assert 2 < granted.lease.sequence < queued.sequence


def test_admission_may_refuse_a_request_that_fits(cluster: Untouched) -> None:
    for task_id, count in (("t", 1), ("dear", 0)):
        granted = allocator.allocate(
            cluster, Request(task_id, 1), SchedulingPass(FIRST_FIT, FIFO, 1.0, limits=admits_all_but("dear"))
        )
        assert len(granted) == count


def test_a_batch_is_decided_in_sequence_on_the_remaining_capacity(cluster: Untouched) -> None:
    requests = [Request("x", 3), Request("y", 3), Request("z", 3), Request("w", 1)]
    changes = allocator.allocate_in_order(cluster, requests, SchedulingPass(FIRST_FIT, FIFO, 1.0))
    assert kinds(changes) == [("Granted", "x"), ("Granted", "y"), ("Granted", "w")]
    assert [change.lease.placement.node for change in changes if isinstance(change, Granted)] == list("aba")
    assert [change.lease.fencing_token for change in changes if isinstance(change, Granted)] == [1, 2, 3]


def test_each_request_of_a_batch_is_admitted_separately(cluster: Untouched) -> None:
    requests = [Request("dear", 1), Request("x", 1)]
    limits = admits_all_but("dear")
    assert kinds(
        allocator.allocate_in_order(cluster, requests, SchedulingPass(FIRST_FIT, FIFO, 1.0, limits=limits))
    ) == [("Granted", "x")]
    assert (
        allocator.allocate_in_order(
            cluster, requests[:1], SchedulingPass(FIRST_FIT, FIFO, 1.0, limits=limits)
        )
        == []
    )


def test_a_batch_overtakes_no_pending_request(cluster: Untouched) -> None:
    cluster.move(held("full", "a"), held("half", "b", 2, token=2), Queued(Request("first", 4), 1.0, 1, 1.0))
    requests = [Request("x", 1), Request("y", 1)]
    assert allocator.allocate_in_order(cluster, requests, SchedulingPass(FIRST_FIT, FIFO, 2.0)) == []
    assert allocator.allocate_in_order(cluster, requests[:1], SchedulingPass(FIRST_FIT, FIFO, 2.0)) == []


def test_a_batch_gets_the_capacity_that_the_queue_leaves(cluster: Untouched) -> None:
    cluster.move(held("full", "a"), Queued(Request("first", 2), 1.0, 1, 1.0))
    requests = [Request("x", 1), Request("y", 2), Request("z", 1)]
    changes = allocator.allocate_in_order(cluster, requests, SchedulingPass(FIRST_FIT, FIFO, 2.0))
    assert kinds(changes) == [("Granted", "first"), ("Granted", "x")]
    (first, x) = (change.lease for change in changes if isinstance(change, Granted))
    assert (first.queued_at, x.queued_at, x.granted_at) == (1.0, 2.0, 2.0)


# ---- the queue ----


def test_a_submitted_request_is_granted_or_queued(cluster: Untouched) -> None:
    assert kinds(allocator.submit(cluster, Request("t", 4), SchedulingPass(FIRST_FIT, FIFO, 1.0))) == [
        ("Granted", "t")
    ]
    cluster.move(held("x", "a"), held("y", "b", token=2))
    assert allocator.submit(cluster, Request("t", 4), SchedulingPass(FIRST_FIT, FIFO, 1.0)) == [
        Queued(Request("t", 4), 1.0, 1, 1.0)
    ]


def test_a_submitted_request_that_is_not_admitted_is_queued(cluster: Untouched) -> None:
    changes = allocator.submit(
        cluster, Request("dear", 1), SchedulingPass(FIRST_FIT, FIFO, 1.0, limits=admits_all_but("dear"))
    )
    assert kinds(changes) == [("Queued", "dear")]


def test_a_submitted_request_overtakes_no_pending_request(cluster: Untouched) -> None:
    cluster.move(held("x", "a"), held("y", "b", 2, token=2), Queued(Request("first", 4), 1.0, 1, 1.0))
    assert kinds(allocator.submit(cluster, Request("t", 1), SchedulingPass(FIRST_FIT, FIFO, 2.0))) == [
        ("Queued", "t")
    ]


@pytest.mark.parametrize(
    ("task_id", "detail"), [("runs", "already holds a lease"), ("waits", "is already pending in the queue")]
)
def test_a_second_request_of_a_task_is_refused(cluster: Untouched, task_id: str, detail: str) -> None:
    cluster.move(held("runs", "a"), Queued(Request("waits", 4), 1.0, 1, 1.0))
    with pytest.raises(DuplicateTaskError, match=f"task '{task_id}' {detail}") as caught:
        allocator.submit(cluster, Request(task_id, 1), SchedulingPass(FIRST_FIT, FIFO, 2.0))
    assert caught.value.lease_id == task_id


def test_a_request_that_never_fits_is_refused_with_a_reason(cluster: Untouched) -> None:
    cluster.move(held("x", "a"), held("y", "b", token=2), Drained("b", 1.0))
    for possible in (Request("t", 4), Request("t", 4, required_node="b")):
        allocator.require_feasible(cluster, possible)
    with pytest.raises(NeverFitsError) as caught:
        allocator.submit(
            cluster, Request("t", 5, resources={"cpus": 1}), SchedulingPass(FIRST_FIT, FIFO, 1.0)
        )
    assert detail_of(caught.value.grounds).endswith("satisfy 5 GPUs and 1 CPU: the largest, a, has 4")
    for unknown in (Request("t", 1, preferred_node="x"), Request("t", 1, required_node="x")):
        with pytest.raises(UnknownNodeError, match="'x' is not in the inventory of 2 servers"):
            allocator.submit(cluster, unknown, SchedulingPass(FIRST_FIT, FIFO, 1.0))


def test_a_retired_node_does_not_count_for_what_could_ever_fit(cluster: Untouched) -> None:
    cluster.move(held("x", "b"), InventoryChanged((node("a", 2, 16),), 1.0))
    with pytest.raises(NeverFitsError) as caught:
        allocator.require_feasible(cluster, Request("t", 4))
    assert detail_of(caught.value.grounds).startswith("no server could ever")


# ---- ends of leases and pending requests ----


# ---- dispatch of pending requests ----


def test_a_release_includes_the_grants_it_makes_possible(cluster: Untouched) -> None:
    cluster.move(held("x", "a"), held("y", "b", token=2))
    cluster.move(Queued(Request("first", 3), 1.0, 1, 1.0), Queued(Request("second", 1), 1.0, 2, 1.0))
    ended = lease_steps.release(cluster, "y", 2.0)
    changes = allocator.with_dispatch(cluster, ended, SchedulingPass(FIRST_FIT, FIFO, 2.0))
    assert kinds(changes) == [("Released", "y"), ("Granted", "first"), ("Granted", "second")]
    assert allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 2.0)) == []
    cluster.move(*ended)
    assert kinds(allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 2.0))) == [
        ("Granted", "first"),
        ("Granted", "second"),
    ]


def test_a_queued_request_that_fits_is_granted_in_the_same_commit(cluster: Untouched) -> None:
    changes = allocator.with_dispatch(
        cluster, [Queued(Request("t", 1), 1.0, 1, 1.0)], SchedulingPass(FIRST_FIT, FIFO, 1.0)
    )
    assert kinds(changes) == [("Queued", "t"), ("Granted", "t")]


def test_without_pending_requests_the_changes_are_returned_alone(cluster: Untouched) -> None:
    cluster.move(held("x", "a"))
    ended = tuple(lease_steps.release(cluster, "x", 2.0))
    assert allocator.with_dispatch(cluster, ended, SchedulingPass(FIRST_FIT, FIFO, 2.0)) == list(ended)


def test_a_request_that_is_not_admitted_does_not_block_the_queue(cluster: Untouched) -> None:
    cluster.move(Queued(Request("dear", 4), 1.0, 1, 1.0), Queued(Request("t", 4), 2.0, 2, 2.0))
    limits = admits_all_but("dear")
    assert kinds(
        allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 3.0, limits=limits))
    ) == [("Granted", "t")]


def test_admission_gets_the_time_at_which_the_request_was_queued(cluster: Untouched) -> None:
    seen: list[tuple[str, float, float]] = []

    class Watching:
        def admits(
            self, cluster: ClusterState, request: Request, members: Members, queued_at: float, now: float
        ) -> bool:
            seen.append((request.lease_id, queued_at, now))
            return True

    limits = Limits(Watching())  # type: ignore[arg-type]
    cluster.move(Queued(Request("t", 1), 1.0, 1, 1.0))
    allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 3.0, limits=limits))
    allocator.allocate(cluster, Request("u", 1), SchedulingPass(FIRST_FIT, FIFO, 4.0, limits=limits))
    assert seen == [("t", 1.0, 3.0), ("u", 4.0, 4.0)]


@pytest.mark.parametrize("order", [FIFO, BACKFILL])
def test_a_request_for_a_closed_node_does_not_block_the_queue(
    cluster: Untouched, order: QueueDiscipline
) -> None:
    cluster.move(
        Drained("b", 1.0),
        Queued(Request("t", 1, required_node="b"), 1.0, 1, 1.0),
        Queued(Request("u", 1), 2.0, 2, 2.0),
    )
    assert kinds(allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, order, 3.0))) == [
        ("Granted", "u")
    ]
    assert not allocator.blocks_queue(
        cluster, Request("t", 1, required_node="b"), SchedulingPass(FIRST_FIT, order, 3.0)
    )
    assert allocator.blocks_queue(
        cluster, Request("t", 1, required_node="a"), SchedulingPass(FIRST_FIT, order, 3.0)
    )
    assert not allocator.blocks_queue(cluster, Request("t", 5), SchedulingPass(FIRST_FIT, order, 3.0))


def test_backfill_starts_requests_that_delay_no_reservation(cluster: Untouched) -> None:
    """Both nodes are half full until 100, when `wide` and `wider` start; requests over by then start now."""
    for token, name in enumerate("ab", 1):
        cluster.move(held(f"runs-{name}", name, 2, token=token, expected_runtime_s=100.0))
    waits = (
        ("wide", 4, 50.0),
        ("wider", 4, 50.0),
        ("short", 1, 100.0),
        ("long", 1, 101.0),
        ("brief", 1, 5.0),
    )
    for task_id, gpus, runtime_s in waits:
        cluster.move(
            Queued(Request(task_id, gpus, expected_runtime_s=runtime_s), 0.0, cluster.sequence + 1, 0.0)
        )
    changes = allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, BACKFILL, 0.0))
    assert kinds(changes) == [("Granted", "short"), ("Granted", "brief")]
    assert allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 0.0)) == []


def test_backfill_counts_requests_started_in_the_same_pass(cluster: Untouched) -> None:
    """Either of `first` and `second` fits beside the reservation on a, but not both."""
    cluster.move(held("runs", "a", 2, expected_runtime_s=100.0), Drained("b", 0.0))
    waits = (("wide", 3, 50.0), ("first", 1, 500.0), ("second", 1, 500.0))
    for task_id, gpus, runtime_s in waits:
        cluster.move(
            Queued(Request(task_id, gpus, expected_runtime_s=runtime_s), 0.0, cluster.sequence + 1, 0.0)
        )
    changes = allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, BACKFILL, 0.0))
    assert kinds(changes) == [("Granted", "first")]


# ---- consistency check ----


def test_free_and_allocated_add_up_to_the_inventory(cluster: Untouched) -> None:
    cluster.move(
        held("x", "a", 2, resources={"cpus": 16}),
        Granted(Lease(Request("s", 1, gpu_milli=400), (Placement("a", (3,)),), 2, 0.0), 0.0),
        Granted(Lease(Request("s2", 1, gpu_milli=600), (Placement("a", (3,)),), 3, 0.0), 0.0),
        InventoryChanged((node("a", 4, 8), node("b", 4, 16)), 1.0),
    )
    allocator.check(cluster)  # a lease may have more allocated than its node still has in total


def test_rounding_of_large_amounts_is_tolerated() -> None:
    cluster = ClusterState([Node("a", 0, {"bytes_per_s": 1e9})])
    for token in range(10):
        request = Request(f"t{token}", resources={"bytes_per_s": 0.1})
        cluster.apply(Granted(Lease(request, (Placement("a"),), token, 0.0), 0.0))
    assert cluster.node("a").free["bytes_per_s"] != 1e9 - sum([0.1] * 10), (
        "the amounts must not add up exactly"
    )
    allocator.check(cluster)


@pytest.mark.parametrize(
    ("gpu_free", "cpus", "complaint"),
    [
        (999, 16, "GPU 2 of 'a': 999 milli free, 0 allocated"),
        (1001, 16, "GPU 2 of 'a': 1001 milli free, 0 allocated"),
        (1000, 15, "cpus of 'a': 15 free, 0 allocated"),
        (1000, 17, "cpus of 'a': 17 free, 0 allocated"),
    ],
)
def test_capacity_that_does_not_add_up_is_reported(gpu_free: int, cpus: int, complaint: str) -> None:
    cluster = ClusterState(nodes("ab", 4, 16))
    cluster.node("a").gpu_free[2] = gpu_free
    cluster.node("a").free["cpus"] = cpus
    with pytest.raises(CapacityError, match=complaint):
        allocator.check(cluster)


def test_a_gpu_allocated_twice_is_reported() -> None:
    cluster = ClusterState(nodes("a", 4, 16))
    cluster.apply(held("x", "a", 1))
    cluster.node("a").leases["y"] = cluster.leases["x"]
    with pytest.raises(CapacityError, match="GPU 0 of 'a': 0 milli free, 2000 allocated"):
        allocator.check(cluster)
