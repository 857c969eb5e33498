"""One server's GPUs, and the adoption of others in their place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import GpuClosed
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import InvalidRequestError, ServerInUseError, UnknownNodeError
from tests.builders import redefine


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
        ([Gpu(0, uuid="GPU-x"), Gpu(0, uuid="GPU-y")], "gpus: a GPU number is there twice"),
        ([Gpu(0, uuid="GPU-x"), Gpu(1, uuid="GPU-x")], "gpus: a UUID is there twice"),
        ([Gpu(0, uuid="GPU-b")], "gpus: GPU-b belongs to another server of the inventory"),
    ],
)
def test_a_list_that_names_a_device_twice_changes_nothing(gpus: list[Gpu], line: str) -> None:
    with managed() as manager:
        version = manager.get_resource_summary()["version"]
        with pytest.raises(InvalidRequestError, match=f"^{re.escape(line)}$"):
            manager.adopt("a", gpus)
        assert manager.get_resource_summary()["version"] == version
