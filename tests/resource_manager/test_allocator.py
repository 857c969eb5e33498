"""The pure steps: what each returns for a state, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from resource_manager import allocator
from resource_manager.cluster import ClusterState, Snapshot
from resource_manager.errors import (
    CapacityError,
    DuplicateTaskError,
    InvalidRequestError,
    LeaseNotFoundError,
    UnknownNodeError,
)
from resource_manager.models import (
    Cancelled,
    Change,
    Drained,
    Expired,
    Granted,
    InventoryChanged,
    Lease,
    Node,
    Placement,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Request,
)
from resource_manager.policies import POLICIES, nothing_fits
from resource_manager.queueing import Order, get_order

from .builders import node, nodes

FIRST_FIT = POLICIES["first_fit"]
FIFO = get_order("fifo")
BACKFILL = get_order("fifo+backfill")


@pytest.fixture
def cluster() -> Iterator[ClusterState]:
    """Servers a and b; whatever a test asks of the steps, only what it applies itself moves the state."""
    cluster = Untouched(nodes("ab", 4, 16))
    yield cluster
    assert in_order(cluster) == cluster.expected


def in_order(cluster: ClusterState) -> Snapshot:
    """The snapshot with leases and queue by their numbers: a state promises no other order."""
    snapshot = cluster.snapshot()
    return replace(
        snapshot,
        leases=tuple(sorted(snapshot.leases, key=lambda lease: lease.fencing_token)),
        waiting=tuple(sorted(snapshot.waiting, key=lambda waiting: waiting.sequence)),
    )


class Untouched(ClusterState):
    """A state that notices who moved it."""

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
    lease = Lease(request, Placement(on, tuple(range(gpus))), token, 0.0, request.ttl_s)
    return Granted(lease, 0.0)


def kinds(changes: list[Change]) -> list[tuple[str, str]]:
    """(kind, task) of each change."""
    return [
        (
            type(change).__name__,
            change.lease.task_id
            if isinstance(change, Granted)
            else change.request.task_id
            if isinstance(change, Queued)
            else change.task_id,  # type: ignore[union-attr]
        )
        for change in changes
    ]


def admits_all_but(*task_ids: str) -> Order:
    @dataclass(frozen=True, slots=True)
    class Choosy:
        def admits(
            self, cluster: ClusterState, request: Request, placement: Placement, queued_at: float, now: float
        ) -> bool:
            assert placement.node in cluster.by_name
            assert queued_at <= now
            return request.task_id not in task_ids

    return Order(FIFO.arrange, admission=Choosy())


# ---- where a request goes ----


def test_the_preferred_node_comes_before_the_policys_choice(cluster: Untouched) -> None:
    assert allocator.choose(cluster, Request("t", 1), FIRST_FIT) == Placement("a", (0,))
    assert allocator.choose(cluster, Request("t", 1, preferred_node="b"), FIRST_FIT) == Placement("b", (0,))
    assert allocator.choose(cluster, Request("t", 1, preferred_node="x"), FIRST_FIT) == Placement("a", (0,))
    cluster.move(held("full", "b"))
    assert allocator.choose(cluster, Request("t", 1, preferred_node="b"), FIRST_FIT) == Placement("a", (0,))
    assert allocator.choose(cluster, Request("t", 1, preferred_node="a"), nothing_fits) is None


# ---- grants ----


def test_a_grant_names_everything_about_the_lease(cluster: Untouched) -> None:
    cluster.move(held("other", "a", token=7), Queued(Request("t", 2, ttl_s=60.0), 3.0))
    request = Request("t", 2, ttl_s=60.0)
    granted = allocator.grant(cluster, request, Placement("b", (0, 1)), 5.0)
    lease = Lease(request, Placement("b", (0, 1)), 8, granted_at=5.0, expires_at=65.0, queued_at=3.0)
    assert granted == Granted(lease, 5.0)
    other = Request("u", 2)
    granted = allocator.grant(cluster, other, Placement("b", (0, 1)), 5.0)
    assert granted.lease == Lease(other, Placement("b", (0, 1)), 8, 5.0, math.inf, None)


def test_what_fits_is_granted_and_what_does_not_is_nothing(cluster: Untouched) -> None:
    assert allocator.allocate(cluster, Request("t", 5), FIRST_FIT, 1.0) == []
    (granted,) = allocator.allocate(cluster, Request("t", 4), FIRST_FIT, 1.0)
    assert granted == allocator.grant(cluster, Request("t", 4), Placement("a", (0, 1, 2, 3)), 1.0)


def test_an_order_may_refuse_to_admit(cluster: Untouched) -> None:
    for task_id, count in (("t", 1), ("dear", 0)):
        granted = allocator.allocate(cluster, Request(task_id, 1), FIRST_FIT, 1.0, admits_all_but("dear"))
        assert len(granted) == count


def test_a_batch_is_decided_together_and_each_gets_what_is_left(cluster: Untouched) -> None:
    requests = [Request("x", 3), Request("y", 3), Request("z", 3), Request("w", 1)]
    changes = allocator.allocate_in_turn(cluster, requests, FIRST_FIT, FIFO, 1.0)
    assert kinds(changes) == [("Granted", "x"), ("Granted", "y"), ("Granted", "w")]
    assert [change.lease.placement.node for change in changes if isinstance(change, Granted)] == list("aba")
    assert [change.lease.fencing_token for change in changes if isinstance(change, Granted)] == [1, 2, 3]


def test_a_batch_asks_for_admission_one_by_one(cluster: Untouched) -> None:
    requests = [Request("dear", 1), Request("x", 1)]
    order = admits_all_but("dear")
    assert kinds(allocator.allocate_in_turn(cluster, requests, FIRST_FIT, order, 1.0)) == [("Granted", "x")]
    assert allocator.allocate_in_turn(cluster, requests[:1], FIRST_FIT, order, 1.0) == []


def test_a_batch_overtakes_nobody_who_waits(cluster: Untouched) -> None:
    cluster.move(held("full", "a"), held("half", "b", 2, token=2), Queued(Request("first", 4), 1.0))
    requests = [Request("x", 1), Request("y", 1)]
    assert allocator.allocate_in_turn(cluster, requests, FIRST_FIT, FIFO, 2.0) == []
    assert allocator.allocate_in_turn(cluster, requests[:1], FIRST_FIT, FIFO, 2.0) == []


def test_a_batch_behind_the_queue_gets_what_the_queue_leaves(cluster: Untouched) -> None:
    cluster.move(held("full", "a"), Queued(Request("first", 2), 1.0))
    requests = [Request("x", 1), Request("y", 2), Request("z", 1)]
    changes = allocator.allocate_in_turn(cluster, requests, FIRST_FIT, FIFO, 2.0)
    assert kinds(changes) == [("Granted", "first"), ("Granted", "x")]
    (first, x) = (change.lease for change in changes if isinstance(change, Granted))
    assert (first.queued_at, x.queued_at, x.granted_at) == (1.0, 2.0, 2.0)


# ---- the queue ----


def test_a_submitted_request_starts_or_waits(cluster: Untouched) -> None:
    assert kinds(allocator.submit(cluster, Request("t", 4), FIRST_FIT, FIFO, 1.0)) == [("Granted", "t")]
    cluster.move(held("x", "a"), held("y", "b", token=2))
    assert allocator.submit(cluster, Request("t", 4), FIRST_FIT, FIFO, 1.0) == [Queued(Request("t", 4), 1.0)]


def test_a_submitted_request_that_is_not_admitted_waits(cluster: Untouched) -> None:
    changes = allocator.submit(cluster, Request("dear", 1), FIRST_FIT, admits_all_but("dear"), 1.0)
    assert kinds(changes) == [("Queued", "dear")]


def test_a_submitted_request_overtakes_nobody(cluster: Untouched) -> None:
    cluster.move(held("x", "a"), held("y", "b", 2, token=2), Queued(Request("first", 4), 1.0))
    assert kinds(allocator.submit(cluster, Request("t", 1), FIRST_FIT, FIFO, 2.0)) == [("Queued", "t")]


@pytest.mark.parametrize(
    ("task_id", "detail"), [("runs", "already holds a lease"), ("waits", "already waits in the queue")]
)
def test_a_task_asks_once(cluster: Untouched, task_id: str, detail: str) -> None:
    cluster.move(held("runs", "a"), Queued(Request("waits", 4), 1.0))
    with pytest.raises(DuplicateTaskError, match=f"task '{task_id}' {detail}") as caught:
        allocator.submit(cluster, Request(task_id, 1), FIRST_FIT, FIFO, 2.0)
    assert caught.value.task_id == task_id


def test_what_could_never_fit_is_refused_in_words(cluster: Untouched) -> None:
    cluster.move(held("x", "a"), held("y", "b", token=2), Drained("b", 1.0))
    for possible in (Request("t", 4), Request("t", 4, required_node="b")):
        allocator.refuse_impossible(cluster, possible)
    with pytest.raises(InvalidRequestError, match=r"satisfy 5 GPUs and 1 cpu: the largest, a, has 4$"):
        allocator.submit(cluster, Request("t", 5, resources={"cpus": 1}), FIRST_FIT, FIFO, 1.0)
    for unknown in (Request("t", 1, preferred_node="x"), Request("t", 1, required_node="x")):
        with pytest.raises(UnknownNodeError, match="'x' is not in the inventory of 2 servers"):
            allocator.submit(cluster, unknown, FIRST_FIT, FIFO, 1.0)


def test_a_node_that_left_the_inventory_counts_for_nothing(cluster: Untouched) -> None:
    cluster.move(held("x", "b"), InventoryChanged((node("a", 2, 16),), 1.0))
    with pytest.raises(InvalidRequestError, match="no server could ever"):
        allocator.refuse_impossible(cluster, Request("t", 4))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("t"), "0 GPUs"),
        (Request("t", 2), "2 GPUs"),
        (Request("t", 1, gpu_milli=250), "250 milli of a GPU"),
        (Request("t", 2, gpu_types=("A100", "H100")), "2 GPUs of type A100 or H100"),
        (
            Request("t", 2, gpu_types=("A100",), vendor="amd", resources={"cpus": 4, "fpga": 1}),
            "2 GPUs of type A100 by amd, 4 cpus, 1 fpga",
        ),
        (Request("t", 1, required_node="a"), "1 GPUs, on a"),
    ],
)
def test_a_demand_in_words(request_: Request, words: str) -> None:
    assert allocator.describe(request_) == words


# ---- the ends of leases and waits ----


@pytest.mark.parametrize("token", [None, 7])
def test_a_lease_is_released_or_renewed_by_name(cluster: Untouched, token: int | None) -> None:
    cluster.move(held("t", "a", token=7, ttl_s=60.0))
    ended = allocator.release(cluster, "t", 5.0, fencing_token=token, outcome="success")
    assert ended == [Released("t", 7, 5.0, "success")]
    assert allocator.release(cluster, "t", 5.0) == [Released("t", 7, 5.0, "")]
    assert allocator.renew(cluster, "t", 5.0, fencing_token=token) == [Renewed("t", 7, 5.0, 65.0)]


@pytest.mark.parametrize("step", [allocator.release, allocator.renew])
@pytest.mark.parametrize(("task_id", "token"), [("t", 6), ("t", 8), ("t", 0), ("u", None), ("u", 7)])
def test_a_lease_of_another_is_left_alone(
    cluster: Untouched, step: Callable[..., list[Change]], task_id: str, token: int | None
) -> None:
    cluster.move(held("t", "a", token=7))
    with pytest.raises(LeaseNotFoundError) as caught:
        step(cluster, task_id, 5.0, fencing_token=token)
    assert (caught.value.task_id, caught.value.fencing_token) == (task_id, token)


def test_what_nobody_renewed_ends_or_is_quarantined(cluster: Untouched) -> None:
    cluster.move(
        held("keep", "a", 1, token=1, ttl_s=10.0, quarantine=True),
        held("drop", "b", 1, token=2, ttl_s=20.0),
        held("later", "b", 0, token=3, ttl_s=30.0),
    )
    assert allocator.expire(cluster, 20.0) == [Quarantined("keep", 1, 20.0), Expired("drop", 2, 20.0)]


def test_a_wait_is_cancelled_by_name(cluster: Untouched) -> None:
    cluster.move(held("runs", "a"), Queued(Request("t", 4), 1.0))
    assert allocator.cancel(cluster, "t", 2.0, "tired") == [Cancelled("t", 2.0, "tired")]
    assert allocator.cancel(cluster, "t", 2.0) == [Cancelled("t", 2.0, "")]
    with pytest.raises(LeaseNotFoundError) as caught:
        allocator.cancel(cluster, "runs", 2.0)
    assert caught.value.task_id == "runs"


# ---- serving those who wait ----


def test_who_frees_capacity_grants_it(cluster: Untouched) -> None:
    cluster.move(held("x", "a"), held("y", "b", token=2))
    cluster.move(Queued(Request("first", 3), 1.0), Queued(Request("second", 1), 1.0))
    ended = allocator.release(cluster, "y", 2.0)
    changes = allocator.settle(cluster, ended, FIRST_FIT, FIFO, 2.0)
    assert kinds(changes) == [("Released", "y"), ("Granted", "first"), ("Granted", "second")]
    assert allocator.grant_waiting(cluster, FIRST_FIT, FIFO, 2.0) == []
    cluster.move(*ended)
    assert kinds(allocator.grant_waiting(cluster, FIRST_FIT, FIFO, 2.0)) == [
        ("Granted", "first"),
        ("Granted", "second"),
    ]


def test_who_queues_and_fits_starts_with_the_same_commit(cluster: Untouched) -> None:
    changes = allocator.settle(cluster, [Queued(Request("t", 1), 1.0)], FIRST_FIT, FIFO, 1.0)
    assert kinds(changes) == [("Queued", "t"), ("Granted", "t")]


def test_where_nobody_waits_changes_stand_alone(cluster: Untouched) -> None:
    cluster.move(held("x", "a"))
    ended = tuple(allocator.release(cluster, "x", 2.0))
    assert allocator.settle(cluster, ended, FIRST_FIT, FIFO, 2.0) == list(ended)


def test_who_is_not_admitted_holds_up_nobody(cluster: Untouched) -> None:
    cluster.move(Queued(Request("dear", 4), 1.0), Queued(Request("t", 4), 2.0))
    order = admits_all_but("dear")
    assert kinds(allocator.grant_waiting(cluster, FIRST_FIT, order, 3.0)) == [("Granted", "t")]


def test_admission_counts_the_wait_from_when_it_began(cluster: Untouched) -> None:
    seen: list[tuple[str, float, float]] = []

    class Watching:
        def admits(
            self, cluster: ClusterState, request: Request, placement: Placement, queued_at: float, now: float
        ) -> bool:
            seen.append((request.task_id, queued_at, now))
            return True

    order = Order(FIFO.arrange, admission=Watching())
    cluster.move(Queued(Request("t", 1), 1.0))
    allocator.grant_waiting(cluster, FIRST_FIT, order, 3.0)
    allocator.allocate(cluster, Request("u", 1), FIRST_FIT, 4.0, order)
    assert seen == [("t", 1.0, 3.0), ("u", 4.0, 4.0)]


@pytest.mark.parametrize("order", [FIFO, BACKFILL])
def test_who_waits_for_a_closed_server_holds_up_nobody(cluster: Untouched, order: Order) -> None:
    cluster.move(
        Drained("b", 1.0), Queued(Request("t", 1, required_node="b"), 1.0), Queued(Request("u", 1), 2.0)
    )
    assert kinds(allocator.grant_waiting(cluster, FIRST_FIT, order, 3.0)) == [("Granted", "u")]
    assert not allocator.blocks(cluster, Request("t", 1, required_node="b"))
    assert allocator.blocks(cluster, Request("t", 1, required_node="a"))
    assert not allocator.blocks(cluster, Request("t", 5))


def test_under_backfill_those_behind_take_what_delays_nobody(cluster: Untouched) -> None:
    """Both servers are half full until 100; `wide` and `wider` start then, and what ends before may go."""
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
        cluster.move(Queued(Request(task_id, gpus, expected_runtime_s=runtime_s), 0.0))
    changes = allocator.grant_waiting(cluster, FIRST_FIT, BACKFILL, 0.0)
    assert kinds(changes) == [("Granted", "short"), ("Granted", "brief")]
    assert allocator.grant_waiting(cluster, FIRST_FIT, FIFO, 0.0) == []


def test_under_backfill_what_started_counts_against_what_comes_next(cluster: Untouched) -> None:
    """`first` and `second` fit a's hole one at a time: together they would hold what is reserved."""
    cluster.move(held("runs", "a", 2, expected_runtime_s=100.0), Drained("b", 0.0))
    waits = (("wide", 3, 50.0), ("first", 1, 500.0), ("second", 1, 500.0))
    for task_id, gpus, runtime_s in waits:
        cluster.move(Queued(Request(task_id, gpus, expected_runtime_s=runtime_s), 0.0))
    changes = allocator.grant_waiting(cluster, FIRST_FIT, BACKFILL, 0.0)
    assert kinds(changes) == [("Granted", "first")]


# ---- the books ----


def test_free_and_held_add_up_to_the_inventory(cluster: Untouched) -> None:
    cluster.move(
        held("x", "a", 2, resources={"cpus": 16}),
        Granted(Lease(Request("s", 1, gpu_milli=400), Placement("a", (3,)), 2, 0.0), 0.0),
        Granted(Lease(Request("s2", 1, gpu_milli=600), Placement("a", (3,)), 3, 0.0), 0.0),
        InventoryChanged((node("a", 4, 8), node("b", 4, 16)), 1.0),
    )
    allocator.check(cluster)  # a lease may hold more than its node still has


def test_the_rounding_of_large_amounts_is_no_mistake() -> None:
    cluster = ClusterState([Node("a", 0, {"bytes_per_s": 1e9})])
    for token in range(10):
        request = Request(f"t{token}", resources={"bytes_per_s": 0.1})
        cluster.apply(Granted(Lease(request, Placement("a"), token, 0.0), 0.0))
    assert cluster.node("a").free["bytes_per_s"] != 1e9 - sum([0.1] * 10), "else this shows nothing"
    allocator.check(cluster)


@pytest.mark.parametrize(
    ("gpu_free", "cpus", "complaint"),
    [
        (999, 16, "GPU 2 of 'a': 999 free, 0 held"),
        (1001, 16, "GPU 2 of 'a': 1001 free, 0 held"),
        (1000, 15, "cpus of 'a': 15 free, 0 held"),
        (1000, 17, "cpus of 'a': 17 free, 0 held"),
    ],
)
def test_books_that_do_not_add_up_are_told(gpu_free: int, cpus: int, complaint: str) -> None:
    cluster = ClusterState(nodes("ab", 4, 16))
    cluster.node("a").gpu_free[2] = gpu_free
    cluster.node("a").free["cpus"] = cpus
    with pytest.raises(CapacityError, match=complaint):
        allocator.check(cluster)


def test_a_gpu_given_out_twice_is_told() -> None:
    cluster = ClusterState(nodes("a", 4, 16))
    cluster.apply(held("x", "a", 1))
    cluster.node("a").leases["y"] = cluster.leases["x"]
    with pytest.raises(CapacityError, match="GPU 0 of 'a': 0 free, 2000 held"):
        allocator.check(cluster)
