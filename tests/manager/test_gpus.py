"""Closed GPUs through the manager: what is refused and why, what an operator opens, and what waits for it."""

from __future__ import annotations

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import AgentSeen, Change, GpuClosed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import InvalidRequestError, UnknownNodeError
from resource_manager.manager.refusal_wording import Refusal

NODE = Node("gpu-a", 0, {"cpus": 8}, (Gpu(0, "A100", uuid="GPU-0000"), Gpu(1, "A100", uuid="GPU-0001")))


@pytest.fixture
def manager() -> GPUResourceManager:
    return GPUResourceManager.from_url("memory://", inventory=[NODE])


def close(manager: GPUResourceManager, gpu_id: int, *, stop: bool = False) -> None:
    def step(cluster: ClusterState, now: float) -> list[Change]:
        return [GpuClosed("gpu-a", gpu_id, "", "xid 79; fell off the bus", now, stop)]

    assert len(manager.commit(step)) == 1


def test_a_closed_gpu_is_never_granted_until_an_operator_opens_it(manager: GPUResourceManager) -> None:
    close(manager, 0)
    refusal = manager.allocate("both", 2, 1)
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, refusal.detail) == (
        RefusalKind.MAINTENANCE,
        "gpu-a has 1 free but GPU 0 is closed: xid 79; fell off the bus",
    )
    one = manager.allocate_resources("one", 1, 1)
    assert one is not None
    assert one["gpu_ids"] == [1]
    assert manager.submit("both", 2, 1)["state"] == "WAITING"
    reasons = manager.explain("x", 1)["servers"][0]["reasons"]
    assert reasons == ["0 of 2 GPUs free, 1 requested", "GPU 0 is closed: xid 79; fell off the bus"]
    server = manager.get_resource_summary()["servers"][0]
    assert (server["available_gpus"], server["closed_gpus"], server["state"]) == (0, 1, "FULL")
    assert server["gpus_closed"][0]["reason"] == "xid 79; fell off the bus"
    assert manager.release_resources("one")
    opened = manager.resume("gpu-a", "GPU-0000")
    assert opened["gpus_closed"] == []
    granted = manager.status_of("both")
    assert granted is not None
    assert granted["state"] == "RUNNING", "opening grants what waited for it"


def test_a_request_that_only_a_closed_gpu_could_satisfy_does_not_block_the_queue(
    manager: GPUResourceManager,
) -> None:
    close(manager, 1)
    manager.submit("both", 2, 1)
    assert manager.submit("one", 1, 1)["state"] == "RUNNING"


def test_an_operator_drains_one_gpu(manager: GPUResourceManager) -> None:
    lease = manager.allocate_resources("t", 2, 1)
    assert lease is not None
    closed = manager.drain("gpu-a", 1, reason="fans")["gpus_closed"]
    assert [(each["gpu_id"], each["reason"]) for each in closed] == [(1, "drained; fans")]
    assert manager.leases()[0]["gpu_failed"] == "", "what runs there goes on"
    manager.release_resources("t")
    refusal = manager.allocate("both", 2, 1)
    assert isinstance(refusal, Refusal)
    assert refusal.detail == "gpu-a has 1 free but GPU 1 is closed: drained; fans"
    assert manager.resume("gpu-a", 1)["available_gpus"] == 2
    with pytest.raises(InvalidRequestError, match="whole server"):
        manager.drain("gpu-a", 1, failed=True)


def test_a_drained_gpu_keeps_the_mark_of_its_failure(manager: GPUResourceManager) -> None:
    manager.allocate_resources("t", 2, 1)
    close(manager, 1, stop=True)
    manager.drain("gpu-a", 1)
    assert manager.leases()[0]["gpu_failed"] == "drained"


def test_a_lease_on_a_gpu_that_failed_says_so_and_goes_on(manager: GPUResourceManager) -> None:
    manager.allocate_resources("t", 2, 1)
    close(manager, 0)
    assert manager.leases()[0]["gpu_failed"] == ""
    close(manager, 1, stop=True)
    assert manager.renew("t")["gpu_failed"] == "xid 79; fell off the bus"


def test_an_operator_confirms_that_a_gpu_is_clean(manager: GPUResourceManager) -> None:
    manager.commit(lambda cluster, now: [AgentSeen("gpu-a", now)])
    manager.allocate_resources("t", 1, 1)
    manager.release_resources("t")
    summary = manager.get_resource_summary()["servers"][0]
    assert [(each["gpu_id"], each["task_id"]) for each in summary["gpus_cleaning"]] == [(0, "t")]
    assert (summary["available_gpus"], summary["closed_gpus"]) == (1, 1)
    assert manager.resume(0, 0)["available_gpus"] == 2
    version = manager.get_resource_summary()["version"]
    manager.resume("gpu-a", 0)
    assert manager.get_resource_summary()["version"] == version, "it was open and clean"


def test_an_estimate_takes_gpus_as_clean_soon_after_their_lease(manager: GPUResourceManager) -> None:
    manager.commit(lambda cluster, now: [AgentSeen("gpu-a", now)])
    manager.allocate_resources("t", 1, 1)
    manager.release_resources("t")
    lease = manager.allocate_resources("u", 1, 1, expected_runtime=100)
    assert lease is not None
    entry = manager.submit("both", 2, 1)
    start = manager.queue()[0]["estimated_start"]["at"]
    assert entry["state"] == "WAITING"
    assert start == pytest.approx(lease["granted_at"] + 100, abs=1)


def test_an_unknown_gpu_is_named(manager: GPUResourceManager) -> None:
    with pytest.raises(InvalidRequestError, match=r"^server gpu-a has no GPU '7': name its number or UUID$"):
        manager.resume("gpu-a", 7)
    with pytest.raises(UnknownNodeError):
        manager.resume("gpu-z", 0)
