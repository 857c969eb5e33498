"""Identity of GPUs: a lease keeps its devices whatever their numbers, and has one MIG device at most."""

from dataclasses import replace

import pytest

from resource_manager.core.changes import Granted, InventoryChanged, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.errors import CapacityError
from resource_manager.manager.refusal_wording import detail_of, reasons_of
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import POLICIES, get_policy, select_placement
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.reasons.feasibility import explain
from resource_manager.scheduling.scheduling_pass import SchedulingPass

FIRST_FIT = get_policy("first_fit")
MIG_TYPE = "A100-SXM4-80GB:1g.10gb"


def server(*uuids: str, name: str = "a") -> Node:
    return Node(name, 0, {"cpus": 64}, tuple(Gpu(i, "A100", uuid=uuid) for i, uuid in enumerate(uuids)))


def grant(cluster: ClusterState, lease_id: str, gpus: int = 1) -> Placement:
    [granted] = allocator.allocate(cluster, Request(lease_id, gpus), SchedulingPass(FIRST_FIT, fifo, 0.0))
    assert isinstance(granted, Granted)
    cluster.apply(granted)
    return granted.lease.placement


def free(cluster: ClusterState) -> dict[int, int]:
    allocator.check(cluster)
    return cluster.by_name["a"].gpu_free


def test_a_grant_names_the_devices_of_the_inventory() -> None:
    assert grant(ClusterState([server("GPU-x", "GPU-y")]), "t", 2) == Placement(
        "a", (0, 1), ("GPU-x", "GPU-y")
    )


@pytest.mark.parametrize("uuids", [("", ""), ("GPU-x", "")])
def test_without_a_uuid_for_each_of_its_gpus_a_grant_names_none(uuids: tuple[str, str]) -> None:
    assert grant(ClusterState([server(*uuids)]), "t", 2) == Placement("a", (0, 1))


def test_numbers_that_shift_move_no_lease_to_another_device() -> None:
    cluster = ClusterState([server("GPU-w", "GPU-x", "GPU-y", "GPU-z")])
    for lease_id in "wxyz":
        grant(cluster, lease_id)
    cluster.apply(Released("w", 1, 0.0))
    shifted = InventoryChanged((server("GPU-x", "GPU-y", "GPU-z", "GPU-new"),), 1.0)
    cluster.apply(shifted)
    node = cluster.by_name["a"]
    assert [node.gpu_ids_of(lease.placement) for lease in cluster.leases.values()] == [(0,), (1,), (2,)]
    assert free(cluster) == {0: 0, 1: 0, 2: 0, 3: 1000}
    assert grant(cluster, "t").gpu_uuids == ("GPU-new",)
    again = ClusterState.from_snapshot(cluster.snapshot())
    assert free(again) == free(cluster)
    cluster.apply(Released("y", 3, 2.0))
    assert free(cluster) == {0: 0, 1: 1000, 2: 0, 3: 0}
    assert grant(cluster, "u").gpu_uuids == ("GPU-y",)


def test_a_device_that_left_takes_no_other_with_it_and_is_still_held_when_it_comes_back() -> None:
    cluster = ClusterState([server("GPU-x", "GPU-y")])
    grant(cluster, "x")
    cluster.apply(InventoryChanged((server("GPU-y"),), 1.0))
    assert cluster.by_name["a"].gpu_ids_of(cluster.leases["x"].placement) == ()
    assert free(cluster) == {0: 1000}
    cluster.apply(InventoryChanged((server("GPU-y", "GPU-x"),), 2.0))
    assert free(cluster) == {0: 1000, 1: 0}


def test_a_lease_keeps_its_numbers_where_uuids_are_pinned_only_before_or_only_now() -> None:
    pinned, plain = server("GPU-x", "GPU-y"), server("", "")
    for before, after in ((pinned, plain), (plain, pinned)):
        cluster = ClusterState([before])
        grant(cluster, "t")
        cluster.apply(InventoryChanged((after,), 1.0))
        assert free(cluster) == {0: 0, 1: 1000}


def test_a_grant_of_a_device_that_is_not_there_is_refused() -> None:
    cluster = ClusterState([server("GPU-x", "GPU-y")])
    lease = Lease(Request("t", 1), (Placement("a", (0,), ("GPU-z",)),), 1, 0.0)
    with pytest.raises(CapacityError, match=r"'t' names GPUs \('GPU-z',\), which are not those of 'a'"):
        cluster.apply(Granted(lease, 0.0))


def mig_server(*, whole: int = 0) -> Node:
    devices = tuple(Gpu(i, MIG_TYPE, memory_mib=9728, uuid=f"MIG-{i}") for i in range(3))
    return replace(server(), gpus=devices + tuple(Gpu(3 + i, "A100", uuid=f"GPU-{i}") for i in range(whole)))


def test_a_lease_takes_one_mig_device_and_several_are_refused_in_one_line() -> None:
    cluster = ClusterState([mig_server()])
    assert grant(cluster, "t") == Placement("a", (0,), ("MIG-0",))
    several = Request("u", 2, gpu_types=(MIG_TYPE,))
    refusal = never_fits(cluster, several)
    assert refusal is not None
    assert detail_of(refusal) == (
        f"no server could ever satisfy 2 {MIG_TYPE}: a lease on MIG devices has gpus=1, since CUDA shows a "
        "process one of them"
    )
    [verdict] = explain(cluster, several)
    assert reasons_of(verdict.reasons, several) == [
        "a lease on MIG devices has gpus=1, since CUDA shows a process one of them; it has 0 other GPUs, "
        "2 requested",
    ]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_gives_several_gpus_without_mig_devices(name: str) -> None:
    cluster = ClusterState([mig_server(whole=2)])
    placement = select_placement(cluster, Request("t", 2), get_policy(name))
    assert placement is not None
    assert set(placement.gpu_ids) == {3, 4}
    assert select_placement(cluster, Request("t", 3), get_policy(name)) is None
    assert select_placement(cluster, Request("t", 1), get_policy(name)) is not None
