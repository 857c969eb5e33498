"""Devices that are visible to a job."""

import shlex
from itertools import pairwise
from typing import Any, get_args

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.jobs.launchers import Job, LauncherError, build_docker_cmd
from resource_manager.jobs.launchers.devices import VISIBLE_DEVICES, device_environment, job_environment
from resource_manager.manager.cluster_file.servers import Vendor
from tests.builders import granted_lease


def test_whole_gpus_of_every_vendor():
    assert device_environment("nvidia", [4, 5]) == {
        "CUDA_VISIBLE_DEVICES": "4,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "4,5",
    }
    assert device_environment("amd", [0]) == {"ROCR_VISIBLE_DEVICES": "0"}
    assert device_environment("ascend", [1, 2]) == {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}


PINNED = [
    Node("a", 0, {"cpus": 8}, (Gpu(0, uuid="GPU-8f6a"), Gpu(1, uuid="GPU-77b2"))),
    Node("m", 1, {"cpus": 8}, (Gpu(0, "A100:1g.10gb", uuid="MIG-11c3"),)),
]


@pytest.mark.parametrize(
    ("asked", "uuids", "numbers"),
    [
        ({"gpus": 2, "server": "a"}, "GPU-8f6a,GPU-77b2", "0,1"),
        ({"gpus": 1, "server": "m"}, "MIG-11c3", "0"),
        ({"gpus": 1, "gpu_milli": 250, "server": "a"}, "GPU-8f6a", "0"),
    ],
)
def test_pinned_gpus_are_named_by_uuid_also_in_a_container(asked, uuids, numbers):
    with GPUResourceManager.from_url("memory://", inventory=PINNED) as manager:
        allocation = granted_lease(manager.submit("t", **asked))
    assert (",".join(allocation["gpu_uuids"]), allocation["gpu_devices"]) == (uuids, numbers)
    assert allocation["members"][0]["gpu_uuids"] == allocation["gpu_uuids"]
    job = Job("k", ("true",), gpu_ids=(*allocation["gpu_ids"],), gpu_uuids=(*allocation["gpu_uuids"],))
    for renumbered in (False, True):
        environment = job_environment(job, renumbered=renumbered)
        assert environment["CUDA_VISIBLE_DEVICES"] == environment["NVIDIA_VISIBLE_DEVICES"] == uuids
        assert (environment["GPU_LEASE_GPUS"], environment["GPU_LEASE_UUIDS"]) == (numbers, uuids)
    words = shlex.split(build_docker_cmd(allocation, "img"))
    assert words[words.index("--gpus") + 1] == f'"device={uuids}"'
    assert f"CUDA_VISIBLE_DEVICES={uuids}" in words


@pytest.mark.parametrize(
    ("vendor", "name"), [("amd", "ROCR_VISIBLE_DEVICES"), ("ascend", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_other_makers_runtimes_get_numbers_even_if_uuids_are_pinned(vendor, name):
    assert device_environment(vendor, [1], ["d86c0a3b"])[name] == "1"


def test_without_uuids_a_job_gets_no_variable_for_them():
    assert "GPU_LEASE_UUIDS" not in job_environment(Job("k", ("true",), gpu_ids=(0,)))


def test_a_gpu_fraction_limits_threads_and_memory():
    environment = device_environment("nvidia", [3], gpu_milli=250, gpu_memory_mib=20480)
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in device_environment("nvidia", [3], gpu_milli=250)


@pytest.mark.parametrize(("memory_mib", "limit"), [(81920, "0=20480M"), (0, None)])
def test_a_fraction_of_the_inventorys_memory_reaches_the_job(memory_mib, limit):
    nodes = [Node("a", 0, {"cpus": 8}, (Gpu(4, memory_mib=memory_mib),))]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        allocation = granted_lease(manager.allocate_resources("t", 1, 2, gpu_milli=250))
    assert allocation["gpu_memory_mib"] == memory_mib // 4
    taken: dict[str, Any] = {name: allocation[name] for name in ("gpu_ids", "gpu_milli", "gpu_memory_mib")}
    environment = job_environment(Job("k", ("true",), **taken))
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == limit
    assert (f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limit}" in build_docker_cmd(allocation, "img")) is bool(limit)


@pytest.mark.parametrize(
    ("vendor", "files"),
    [
        ("nvidia", []),
        ("amd", ["/dev/kfd", "/dev/dri"]),
        (
            "ascend",
            ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/davinci1", "/dev/davinci2"],
        ),
    ],
)
def test_a_container_gets_the_device_files_of_its_own_gpus(vendor, files):
    allocation = {"task_id": "t", "gpu_ids": [1, 2], "cpu_count": 4, "vendor": vendor}
    words = shlex.split(build_docker_cmd(allocation, "img"))
    assert [word for before, word in pairwise(words) if before == "--device"] == files
    assert ("--gpus" in words) is (vendor == "nvidia")
    without = shlex.split(build_docker_cmd({**allocation, "gpu_ids": []}, "img"))
    assert not {"--device", "--gpus"} & set(without)


def test_an_inventory_accepts_exactly_the_vendors_of_the_launchers():
    assert set(get_args(Vendor)) == set(VISIBLE_DEVICES)


def test_no_gpus_hides_all_and_an_unknown_vendor_is_refused():
    assert device_environment("", [])["NVIDIA_VISIBLE_DEVICES"] == "void"
    with pytest.raises(LauncherError, match="unknown GPU vendor 'matrox'; known are nvidia, amd, ascend"):
        device_environment("matrox", [0])
