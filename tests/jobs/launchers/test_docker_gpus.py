"""GPUs of a container: by CDI names where the engine knows them, else by the device request of `--gpus`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager.jobs.launchers import Job
from resource_manager.jobs.launchers.docker import DockerLauncher

docker = pytest.importorskip("docker")

KNOWN = [{"Source": "cdi", "ID": f"nvidia.com/gpu=GPU-{n}"} for n in range(2)]
RUNTIMES = {"runc": {}, "nvidia": {}}
DIRS = ["/etc/cdi"]


@pytest.mark.parametrize(
    ("engine", "is_cdi"),
    [
        ({"Runtimes": RUNTIMES}, False),
        ({"Runtimes": RUNTIMES, "CDISpecDirs": DIRS}, False),
        ({"Runtimes": RUNTIMES, "CDISpecDirs": DIRS, "DiscoveredDevices": None}, False),
        ({"Runtimes": RUNTIMES, "CDISpecDirs": DIRS, "DiscoveredDevices": KNOWN[:1]}, False),
        ({"Runtimes": RUNTIMES, "CDISpecDirs": DIRS, "DiscoveredDevices": KNOWN}, True),
        ({"Runtimes": {"runc": {}}, "CDISpecDirs": DIRS}, True),
        ({"Runtimes": {"runc": {}}}, False),
    ],
)
def test_cdi_names_are_used_where_the_engine_knows_all_of_them(engine: dict[str, Any], is_cdi: bool) -> None:
    launcher = DockerLauncher.__new__(DockerLauncher)
    launcher._docker, launcher._api = docker, SimpleNamespace(info=lambda: engine)
    job = Job("j", "true", gpu_ids=(0, 1), gpu_uuids=("GPU-0", "GPU-1"))
    [asked] = launcher.device_requests(job)
    assert (asked["Driver"] == "cdi") == is_cdi
    names = [known["ID"] for known in KNOWN] if is_cdi else ["GPU-0", "GPU-1"]
    assert asked["DeviceIDs"] == names
