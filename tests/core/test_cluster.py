"""The state as a fold of changes: capacity is never exceeded, trials leave no trace, indexes agree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from resource_manager.core.changes import (
    AgentSeen,
    Cancelled,
    Drained,
    Expired,
    Granted,
    InventoryChanged,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.errors import CapacityError, CorruptStateError, LeaseNotFoundError, UnknownNodeError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import ORDERS, fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass


def granted(request: Request, node: str, *gpu_ids: int, token: int = 1, ends: float = math.inf) -> Granted:
    return Granted(Lease(request, (Placement(node, gpu_ids),), token, 0.0, ends), 0.0)


@pytest.fixture
def cluster() -> ClusterState:
    return ClusterState(default_inventory())


def test_a_grant_allocates_and_a_release_deallocates(cluster: ClusterState) -> None:
    empty = cluster.snapshot()
    cluster.apply(granted(Request("t", gpus=2, resources={"cpus": 60}), "gpu-server-1", 3, 5))
    state = cluster.node("gpu-server-1")
    assert (state.whole_free, state.free_milli, state.free["cpus"]) == (6, 6000, 4)
    assert state.gpu_free[3] == state.gpu_free[5] == 0
    cluster.apply(Released("t", 1, 1.0))
    assert (state.whole_free, state.free["cpus"]) == (8, 64)
    assert cluster.snapshot().nodes == empty.nodes
    allocator.check(cluster)


@pytest.mark.parametrize(
    ("request_", "node", "gpu_ids"),
    [
        (Request("x", gpus=1), "gpu-server-0", (0,)),  # allocated to "t"
        (Request("x", gpus=1), "gpu-server-0", (8,)),  # no such GPU
        (Request("x", gpus=2), "gpu-server-0", (4,)),  # too few GPUs
        (Request("x", gpus=2), "gpu-server-0", (4, 4)),  # the same GPU twice
        (Request("x", resources={"cpus": 65}), "gpu-server-0", ()),
        (Request("x", resources={"fpga": 1}), "gpu-server-0", ()),
        (Request("x", gpus=1, gpu_milli=500), "gpu-server-0", (0,)),
        (Request("t", gpus=1), "gpu-server-0", (5,)),  # this task holds a lease
    ],
)
def test_a_grant_of_capacity_that_is_not_free_is_refused_and_changes_nothing(
    cluster: ClusterState, request_: Request, node: str, gpu_ids: tuple[int, ...]
) -> None:
    cluster.apply(granted(Request("t", gpus=2), "gpu-server-0", 0, 1))
    before = cluster.snapshot()
    with pytest.raises(CapacityError):
        cluster.apply(granted(request_, node, *gpu_ids, token=2))
    assert cluster.snapshot() == before
    allocator.check(cluster)


def test_only_the_matching_fencing_token_ends_or_renews_a_lease(cluster: ClusterState) -> None:
    cluster.apply(granted(Request("t"), "gpu-server-0", token=5))
    for change in (Released("t", 4, 1.0), Expired("t", 6, 1.0), Renewed("t", 4, 1.0), Released("u", 5, 1.0)):
        with pytest.raises(LeaseNotFoundError):
            cluster.apply(change)
    with pytest.raises(UnknownNodeError):
        cluster.apply(Drained("nowhere", 1.0))
    with pytest.raises(LeaseNotFoundError):
        cluster.apply(Cancelled("t", 1.0))


def test_a_trial_leaves_no_trace(cluster: ClusterState) -> None:
    cluster.apply(
        granted(Request("t", gpus=2, resources={"cpus": 8}, ttl_s=60), "gpu-server-0", 0, 1, ends=60.0)
    )
    cluster.apply(granted(Request("q", ttl_s=60, quarantine=True), "gpu-server-3", token=2, ends=60.0))
    cluster.apply(Queued(Request("w1", gpus=8), 1.0, 1, 1.0))
    cluster.apply(Queued(Request("w2", gpus=8), 1.0, 2, 1.0))
    before, masks = cluster.snapshot(), list(cluster.whole_free_masks)
    with cluster.trial():
        cluster.apply(Renewed("t", 1, 2.0, 70.0))
        cluster.apply(Quarantined("q", 2, 2.0))
        cluster.apply(Released("t", 1, 2.0))
        cluster.apply(granted(Request("w1", gpus=8), "gpu-server-0", *range(8), token=3))
        cluster.apply(Cancelled("w2", 2.0))
        cluster.apply(Drained("gpu-server-2", 2.0))
        cluster.apply(Resumed("gpu-server-2", 2.0))
        cluster.apply(Drained("gpu-server-2", 2.0))
        cluster.apply(Queued(Request("w3"), 2.0, 3, 2.0))
    after = cluster.snapshot()
    assert sorted(after.pending, key=lambda w: w.sequence) == list(before.pending)
    assert {lease.lease_id: lease for lease in after.leases} == {
        lease.lease_id: lease for lease in before.leases
    }
    assert (after.version, after.last_fencing_token, after.sequence, after.drained) == (4, 2, 2, ())
    assert cluster.whole_free_masks == masks
    assert cluster.open_mask == 0b1111
    assert [lease.lease_id for lease in cluster.expired(61.0)] == ["t", "q"]
    allocator.check(cluster)


def test_expired_returns_each_lease_once_and_does_not_consume_it(cluster: ClusterState) -> None:
    cluster.apply(granted(Request("a", ttl_s=10), "gpu-server-0", token=1, ends=10.0))
    cluster.apply(granted(Request("b", ttl_s=5), "gpu-server-0", token=2, ends=5.0))
    cluster.apply(Renewed("b", 2, 1.0, 6.0))
    assert cluster.expired(4.0) == []
    for _ in range(2):  # `expired` changes nothing
        assert [lease.lease_id for lease in cluster.expired(10.0)] == ["b", "a"]
    cluster.apply(Quarantined("b", 2, 10.0))
    assert [lease.lease_id for lease in cluster.expired(99.0)] == ["a"]


def test_leases_expire_in_the_order_of_their_ends_among_thousands_released(cluster: ClusterState) -> None:
    for i in range(10_000):
        cluster.apply(granted(Request(f"t{i}", ttl_s=1e6), "gpu-server-0", token=i + 1, ends=1e6 + i))
        if i % 1000:
            cluster.apply(Released(f"t{i}", i + 1, 0.0))
    assert [lease.lease_id for lease in cluster.expired(2e6)] == [f"t{i}" for i in range(0, 10_000, 1000)]


def test_float_amounts_are_restored_exactly_when_a_node_is_empty() -> None:
    cluster = ClusterState([Node("n", 0, {"compute_tflops": 57.6})])
    for i in range(7):
        cluster.apply(granted(Request(f"t{i}", resources={"compute_tflops": 0.1}), "n", token=i))
    for i in range(7):
        cluster.apply(Released(f"t{i}", i, 1.0))
    assert cluster.node("n").free["compute_tflops"] == 57.6


@pytest.mark.parametrize("size", [1.0, 1e5 / 7])
def test_a_grant_by_another_replica_is_not_refused_for_float_rounding(size: float) -> None:
    """A replica that applied the first lease's grant and release could otherwise never follow the store."""

    def use(task_id: str, share: float, token: int) -> Granted:
        return granted(Request(task_id, resources={"share": share * size}), "n", token=token)

    saw_all = ClusterState([Node("n", 0, {"share": size, "cpus": 1})])
    for change in use("a", 0.3, 1), use("b", 0.2, 2), Released("a", 1, 1.0):
        saw_all.apply(change)
    came_late = ClusterState.from_snapshot(saw_all.snapshot())
    last = use("c", came_late.node("n").free["share"] / size, 3)
    for cluster in came_late, saw_all:
        cluster.apply(last)
        allocator.check(cluster)
        for more in {"share": 1e-6 * size}, {"cpus": 2}:
            with pytest.raises(CapacityError):
                cluster.apply(granted(Request("d", resources={"cpus": 0, **more}), "n", token=4))


def test_constraints_select_among_mixed_gpus() -> None:
    node = Node("n", 0, {}, (Gpu(0, "A100"), Gpu(1, "H100"), Gpu(2, "H100"), Gpu(5, "MI300", "amd")))
    cluster = ClusterState([node])
    state = cluster.node("n")
    assert state.pick_gpus(Request("t", gpus=2, gpu_types=("H100",))) == (1, 2)
    assert not state.fits(Request("t", gpus=3, gpu_types=("H100",)))
    assert state.fits(Request("t", gpus=3, gpu_types=("H100", "A100")))
    assert state.pick_gpus(Request("t", gpus=1, vendor="amd")) == (5,)
    assert not state.fits(Request("t", gpus=1, vendor="huawei"))
    assert not state.fits(Request("t", vendor="huawei"))


def test_a_gpu_fraction_goes_to_the_tightest_gpu(cluster: ClusterState) -> None:
    cluster.apply(granted(Request("a", gpus=1, gpu_milli=200), "gpu-server-0", 2, token=1))
    cluster.apply(granted(Request("b", gpus=1, gpu_milli=600), "gpu-server-0", 4, token=2))
    state = cluster.node("gpu-server-0")
    assert state.pick_gpus(Request("t", gpus=1, gpu_milli=400)) == (4,)
    assert state.pick_gpus(Request("t", gpus=1, gpu_milli=500)) == (2,)
    assert state.pick_gpus(Request("t", gpus=2)) == (0, 1)


def test_the_journal_returns_changed_nodes_or_none_after_a_cut(cluster: ClusterState) -> None:
    mark = cluster.mark
    cluster.apply(granted(Request("t"), "gpu-server-2"))
    assert cluster.changed_since(mark) == [2]
    assert cluster.changed_since(cluster.mark) == []
    for i in range(3000):
        cluster.apply(granted(Request(f"x{i}"), "gpu-server-1", token=i))
        cluster.apply(Released(f"x{i}", i, 0.0))
    assert cluster.changed_since(mark) is None
    assert len(cluster.journal) < 5000
    mark = cluster.mark
    cluster.apply(InventoryChanged(default_inventory(5), 1.0))
    assert cluster.changed_since(mark) is None


def test_an_inventory_change_keeps_leases_even_on_gpus_that_left(cluster: ClusterState) -> None:
    cluster.apply(granted(Request("t", gpus=2, resources={"cpus": 40}), "gpu-server-0", 6, 7, token=1))
    cluster.apply(Drained("gpu-server-1", 1.0))
    cluster.apply(InventoryChanged(default_inventory(2, gpus=7, cpus=32), 2.0))
    state = cluster.node("gpu-server-0")
    assert state.free["cpus"] == -8
    assert state.whole_free == 6
    assert not cluster.node("gpu-server-1").is_open
    again = ClusterState.from_snapshot(cluster.snapshot())
    assert again.node("gpu-server-0").free == state.free
    cluster.apply(Released("t", 1, 3.0))
    assert (state.whole_free, state.free["cpus"]) == (7, 32)
    allocator.check(cluster)


def test_a_snapshot_that_refers_to_a_missing_server_is_corrupt(cluster: ClusterState) -> None:
    cluster.apply(granted(Request("t", gpus=2), "gpu-server-0", 0, 1, token=1))
    cluster.apply(AgentSeen("gpu-server-1", 1.0))
    whole = cluster.snapshot()
    for gone in ("gpu-server-0", "gpu-server-1"):
        nodes = tuple(node for node in whole.nodes if node.name != gone)
        with pytest.raises(CorruptStateError, match=f"'{gone}', which its inventory lacks"):
            ClusterState.from_snapshot(replace(whole, nodes=nodes))


def test_a_lease_without_a_server_is_corrupt(cluster: ClusterState) -> None:
    cluster.apply(granted(Request("t", gpus=2), "gpu-server-0", 0, 1, token=1))
    whole = cluster.snapshot()
    nowhere = tuple(replace(lease, members=()) for lease in whole.leases)
    with pytest.raises(CorruptStateError, match="lease 't' is on no server"):
        ClusterState.from_snapshot(replace(whole, leases=nowhere))


@pytest.mark.thorough
def test_policies_keep_inventory_order_at_ten_thousand_servers() -> None:
    cluster = ClusterState(default_inventory(10_000))
    cluster.apply(InventoryChanged(default_inventory(10_000), 0.0))
    for i in range(9_999):
        change = allocator.allocate(
            cluster, Request(f"t{i}", gpus=8), SchedulingPass(POLICIES["first_fit"], fifo, 0.0)
        )
        cluster.apply(change[0])
    placement = POLICIES["first_fit"](cluster, Request("last", gpus=1))
    assert placement == Placement("gpu-server-9999", (0,))
    placement = POLICIES["round_robin"](cluster, Request("last", gpus=1))
    assert placement == Placement("gpu-server-9999", (0,))


def test_dispatch_grants_in_order_and_stops_at_the_first_that_does_not_fit(cluster: ClusterState) -> None:
    for i in range(4):
        cluster.apply(granted(Request(f"t{i}", gpus=8), f"gpu-server-{i}", *range(8), token=i + 1))
    for task_id, gpus in (("a", 4), ("b", 8), ("c", 2)):
        cluster.apply(Queued(Request(task_id, gpus=gpus), 1.0, cluster.sequence + 1, 1.0))
    changes = allocator.with_dispatch(
        cluster, [Released("t0", 1, 2.0)], SchedulingPass(POLICIES["first_fit"], ORDERS["fifo"], 2.0)
    )
    assert [type(change).__name__ for change in changes] == ["Released", "Granted"]
    assert cluster.version == 7  # nothing was applied
    for change in changes:
        cluster.apply(change)
    lease = cluster.leases["a"]
    assert (lease.fencing_token, lease.queued_at, lease.granted_at) == (5, 1.0, 2.0)
