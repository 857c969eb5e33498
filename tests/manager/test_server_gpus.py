"""One server's GPUs, and the adoption of others in their place."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import GpuClosed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import InvalidRequestError, ServerInUseError, UnknownNodeError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.server_gpus import replacement
from tests.builders import granted_lease, redefine


def managed(**settings: Any) -> GPUResourceManager:
    nodes = [
        Node("a", 0, {"cpus": 8}, (Gpu(1, uuid="GPU-1"), Gpu(0, "A100", memory_mib=100, uuid="GPU-0"))),
        Node("b", 1, {"cpus": 8}, (Gpu(0, uuid="GPU-b"),)),
    ]
    return GPUResourceManager.from_url("memory://", inventory=nodes, **settings)


def test_a_server_lists_its_gpus_by_number_with_the_tasks_on_each() -> None:
    with managed() as manager:
        manager.submit("t", 1, gpu_milli=500, server="a")
        manager.submit("u", 1, gpu_milli=250, server="a")
        detail = manager.server(0)
    assert (detail["server_name"], detail["total_gpus"]) == ("a", 2)
    assert detail["gpus"] == [
        {
            "gpu_id": 0,
            "uuid": "GPU-0",
            "type": "A100",
            "vendor": "nvidia",
            "memory_mib": 100,
            "free_milli": 250,
            "task_ids": ["t", "u"],
        },
        {
            "gpu_id": 1,
            "uuid": "GPU-1",
            "type": "",
            "vendor": "nvidia",
            "memory_mib": 0,
            "free_milli": 1000,
            "task_ids": [],
        },
    ]
    with pytest.raises(UnknownNodeError):
        manager.server("c")


def test_adopted_gpus_serve_pending_requests_at_once_and_survive_a_reset() -> None:
    with managed() as manager:
        manager.submit("holder", 1, server="b")
        with pytest.raises(ServerInUseError, match=r"'b' has 1 lease \(holder vnpm\)"):
            manager.adopt("b", [Gpu(0, uuid="GPU-new")])
        assert manager.submit("t", 2, server="a")["state"] == "RUNNING"
        manager.submit("waits", 2, server="a")
        manager.drain("a")
        manager.release("t")
        detail = manager.adopt("a", [Gpu(0, uuid="GPU-x"), Gpu(1, uuid="GPU-y")])
        assert [gpu["uuid"] for gpu in detail["gpus"]] == ["GPU-x", "GPU-y"]
        manager.resume("a")
        found = manager.status_of("waits")
        assert found is not None
        assert found["state"] == "RUNNING"
        assert found["gpu_uuids"] == ["GPU-x", "GPU-y"]
        assert manager.reset_resources()
        assert [gpu["uuid"] for gpu in manager.server("a")["gpus"]] == ["GPU-x", "GPU-y"]


def test_a_server_lists_the_gpus_of_its_own_members_of_a_gang() -> None:
    nodes = [Node(name, i, {"cpus": 8}, (Gpu(0), Gpu(1), Gpu(2)), "h") for i, name in enumerate("ab")]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        manager.submit("t", 1, server="b")
        manager.submit("g", 1, nodes=4, spread="pack")
        held = [[gpu["task_ids"] for gpu in manager.server(name)["gpus"]] for name in "ab"]
    assert held == [[["g"], ["g"], ["g"]], [["t"], ["g"], []]]


def test_a_closed_gpu_stays_closed_under_another_number() -> None:
    with managed() as manager:
        manager.commit(lambda cluster, now: [GpuClosed("a", 1, "GPU-1", "xid 48", now, stop=True)])
        manager.adopt("a", [Gpu(0, uuid="GPU-1"), Gpu(1, uuid="GPU-0")])
        assert [gpu["free_milli"] for gpu in manager.server("a")["gpus"]] == [0, 1000]
        redefine(manager, nodes=[Node("c", 2, {"cpus": 8}, (Gpu(5, uuid="GPU-0"), Gpu(7, uuid="GPU-1")))])
        assert [gpu["free_milli"] for gpu in manager.server("c")["gpus"]] == [1000, 0]
        assert manager.explain("t", 2, 1)["kind"] == "maintenance"


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        ([Gpu(0, uuid="GPU-x"), Gpu(0, uuid="GPU-y")], "gpus: GPU number 0 is there twice"),
        (
            [Gpu(0, uuid="GPU-y"), Gpu(1, uuid="GPU-x"), Gpu(2, uuid="GPU-x")],
            "gpus: UUID GPU-x is there twice",
        ),
        ([Gpu(0, uuid="GPU-b")], "gpus: GPU-b belongs to another server of the inventory"),
    ],
)
def test_a_list_that_names_a_device_twice_changes_nothing(gpus: list[Gpu], line: str) -> None:
    with managed() as manager:
        version = manager.get_resource_summary()["version"]
        with pytest.raises(InvalidRequestError, match=f"^{re.escape(line)}$"):
            manager.adopt("a", gpus)
        assert manager.get_resource_summary()["version"] == version


# ---- closures and islands by another list ----


def closures(manager: GPUResourceManager) -> list[tuple[str, int, str, str]]:
    closed = manager.read(lambda cluster, now: cluster.snapshot().closed_gpus)
    return [(each.node, each.gpu_id, each.uuid, each.reason) for each in closed]


@pytest.mark.parametrize("is_adopted", [True, False])
def test_a_closed_gpu_stays_closed_where_its_uuid_becomes_known_or_is_stated_no_more(
    is_adopted: bool,
) -> None:
    plain = Node("a", 0, {"cpus": 8}, tuple(map(Gpu, range(4))))
    pinned = replace(plain, gpus=tuple(Gpu(number, uuid=f"GPU-{number}") for number in range(4)))
    typed = replace(plain, gpus=tuple(Gpu(number, "A100") for number in range(4)))
    with GPUResourceManager.from_url("memory://", inventory=[plain]) as manager:
        manager.drain("a", 3, reason="falls off the bus")
        if is_adopted:
            manager.adopt("a", pinned.gpus)
        else:
            redefine(manager, nodes=[pinned])
        assert closures(manager) == [("a", 3, "GPU-3", "drained; falls off the bus")]
        redefine(manager, nodes=[typed])
        assert closures(manager) == [("a", 3, "", "drained; falls off the bus")]
        manager.resume("a", 3)
        redefine(manager, nodes=[pinned])
        assert closures(manager) == []


def test_a_closure_goes_with_its_device_and_to_no_other_in_its_place() -> None:
    with managed() as manager:
        manager.drain("a", 1)
        manager.adopt("a", [Gpu(0, uuid="GPU-1"), Gpu(1)])
        assert closures(manager) == [("a", 0, "GPU-1", "drained")]
        manager.adopt("a", [Gpu(0, uuid="GPU-new"), Gpu(1)])
        assert closures(manager) == []


def test_a_gpu_that_was_resumed_under_its_servers_new_name_stays_open() -> None:
    with managed() as manager:
        a, b = manager.inventory
        manager.drain("a", 1, reason="fan")
        c = replace(a, name="c", server_id=2)
        redefine(manager, nodes=[c, b])
        assert closures(manager) == [("c", 1, "GPU-1", "drained; fan")]
        manager.resume("c", 1)
        for nodes in ([replace(c, resources={"cpus": 9}), replace(b, gpus=())], [a, b]):
            redefine(manager, nodes=nodes)
            assert closures(manager) == []


def test_a_closure_that_an_older_version_left_under_the_old_name_closes_nothing() -> None:
    gpu = Gpu(1, uuid="GPU-1")
    c, d = Node("c", 2, {}, (gpu,)), Node("d", 3)
    left = GpuClosed("a", 1, "GPU-1", "fan", 1.0)
    cluster = ClusterState.from_snapshot(replace(ClusterState([c]).snapshot(), closed_gpus=(left,)))
    changes = replacement(cluster, (c, d), 2.0, [])
    assert not [each for each in changes if isinstance(each, GpuClosed)]
    cluster.apply(*changes)
    assert cluster.snapshot().closed_gpus == ()


@pytest.mark.parametrize(
    ("uuids", "islands"),
    [
        (["GPU-0", "GPU-1", "GPU-2", "GPU-3"], ((0,), (1, 2))),
        (["", "", "", ""], ((0, 1), (2,))),
    ],
)
def test_islands_go_with_their_gpus_and_the_cluster_is_still_a_file(
    uuids: list[str], islands: tuple[tuple[int, ...], ...]
) -> None:
    """The first of the GPUs is gone, and the driver numbers the others anew."""
    gpus = tuple(Gpu(number, uuid=uuid) for number, uuid in enumerate(uuids))
    node = Node("a", 0, {"cpus": 8}, gpus, islands=((0, 1), (2, 3)))
    with GPUResourceManager.from_url("memory://", inventory=[node]) as manager:
        manager.adopt("a", [Gpu(number, uuid=f"GPU-{number + 1}") for number in range(3)])
        assert manager.inventory[0].islands == islands
        assert not manager.diff(ClusterForm.model_validate(manager.cluster()["sections"]))["changed"]
        [linked] = (island for island in islands if len(island) == 2)
        assert granted_lease(manager.submit("t", 2, link="require"))["gpu_ids"] == [*linked]
