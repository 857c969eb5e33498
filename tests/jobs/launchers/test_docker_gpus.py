"""GPUs of a container: by CDI names where the engine knows them, else by the device request of `--gpus`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import Job, LauncherError
from resource_manager.jobs.launchers.docker import DockerLauncher
from resource_manager.jobs.launchers.docker_container import device_requests
from tests.eventually import wait_for, wait_until_ended

pytest.importorskip("docker")

KNOWN = [{"Source": "cdi", "ID": f"nvidia.com/gpu=GPU-{n}"} for n in range(2)]
RUNTIMES: dict[str, Any] = {"runc": {}, "nvidia": {}}
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
    job = Job("j", ("true",), gpu_ids=(0, 1), gpu_uuids=("GPU-0", "GPU-1"))
    [asked] = device_requests(job, engine)
    assert (asked["Driver"] == "cdi") == is_cdi
    names = [known["ID"] for known in KNOWN] if is_cdi else ["GPU-0", "GPU-1"]
    assert asked["DeviceIDs"] == names


SPEC = """
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices:
  - name: GPU-0
    containerEdits:
      deviceNodes: [{path: /dev/nvidia-of-the-spec, hostPath: /dev/zero}]
"""
IMAGE = "python:3.11-slim"


@pytest.fixture
def cdi_engine() -> Iterator[str]:
    """The address of a Docker engine of its own that has CDI on, with one device, which is /dev/zero."""
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("needs root and dockerd on the PATH")
    version = subprocess.run(["dockerd", "--version"], capture_output=True, text=True, check=True).stdout
    if int(re.findall(r"\d+", version)[0]) < 25:
        pytest.skip(f"needs Docker 25, the first with CDI, not {version.strip()}")
    tmp_path = Path(tempfile.mkdtemp())  # a socket's path is short
    saved = subprocess.run(["docker", "save", IMAGE, "-o", tmp_path / "image.tar"], capture_output=True)
    if saved.returncode != 0:
        pytest.skip(f"needs a Docker engine with the image {IMAGE}")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "gpu.yaml").write_text(SPEC)
    own = {"features": {"cdi": True}, "cdi-spec-dirs": [str(tmp_path / "specs")], "userland-proxy": False}
    (tmp_path / "daemon.json").write_text(json.dumps(own))
    url = f"unix://{tmp_path}/docker.sock"
    places = {
        "data-root": "data",
        "exec-root": "exec",
        "pidfile": "pid",
        "config-file": "daemon.json",
    }
    engine = subprocess.Popen(
        [
            # Without a bridge an engine deletes docker0, another engine's too: here it sees none.
            *("unshare", "--net", "dockerd", "--host", url, "--bridge", "none", "--iptables=false"),
            *(part for option, name in places.items() for part in (f"--{option}", str(tmp_path / name))),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        load = ["docker", "--host", url, "load", "-i", str(tmp_path / "image.tar")]

        def is_loaded() -> bool:
            assert engine.poll() is None, "the engine ended"
            return subprocess.run(load, capture_output=True).returncode == 0

        wait_for(is_loaded, 60.0, "an answer of the engine", every_s=0.5)
        yield url
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(30)
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.e2e
def test_a_real_engine_gives_a_container_the_device_of_that_cdi_name_and_refuses_an_unknown_one(
    cdi_engine: str,
) -> None:
    with closing(DockerLauncher(JobPlace("docker", cdi_engine))) as launcher:
        job = Job("known", ("sh", "-c", "ls /dev/nvidia*"), image=IMAGE, gpu_ids=(0,), gpu_uuids=("GPU-0",))
        launcher.prepare(job)
        launcher.start(job)
        wait_until_ended(launcher, "known")
        assert launcher.logs("known").text == "/dev/nvidia-of-the-spec\n"
        launcher.stop("known")
        unknown = Job("unknown", ("true",), image=IMAGE, gpu_ids=(0,), gpu_uuids=("GPU-7",))
        with pytest.raises(LauncherError, match=r"unresolvable CDI devices nvidia\.com/gpu=GPU-7"):
            launcher.start(unknown)
        launcher.stop("unknown")
