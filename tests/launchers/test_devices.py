"""What a job sees of its GPUs."""

import pytest

from resource_manager.launchers import LauncherError
from resource_manager.launchers.devices import device_environment


def test_whole_gpus_of_every_vendor():
    assert device_environment("nvidia", [4, 5]) == {
        "CUDA_VISIBLE_DEVICES": "4,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "4,5",
    }
    assert device_environment("amd", [0]) == {"ROCR_VISIBLE_DEVICES": "0"}
    assert device_environment("ascend", [1, 2]) == {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}


def test_a_share_limits_threads_and_memory():
    environment = device_environment("nvidia", [3], gpu_milli=250, gpu_memory_mib=81920)
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in device_environment("nvidia", [3], gpu_milli=250)


def test_no_gpus_hides_all_and_an_unknown_vendor_is_refused():
    assert device_environment("", [])["NVIDIA_VISIBLE_DEVICES"] == "void"
    with pytest.raises(LauncherError, match="unknown GPU vendor 'matrox'; known are nvidia, amd, ascend"):
        device_environment("matrox", [0])
