"""Jobs of a Docker engine of its own, whose disk they fill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import AlreadyEndedError, Job, JobState, JobStatus
from resource_manager.jobs.launchers.docker import DockerLauncher
from tests.eventually import wait_for

pytest.importorskip("docker")
pytestmark = pytest.mark.e2e

PROGRAMS = ("sh", "sleep", "dd", "touch")
FILL = "dd if=/dev/zero of=/filler bs=65536; dd if=/dev/zero of=/rest bs=512; touch /full"


@pytest.fixture
def engine() -> Iterator[str]:
    """The address of an engine with 80 MB, and an image with a few programs of this machine."""
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("needs root and dockerd on the PATH")
    place = Path(tempfile.mkdtemp())  # a socket's path is short
    for folder in ("data", "image"):
        (place / folder).mkdir()
    for path in map(shutil.which, PROGRAMS):
        libraries = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
        for each in (f"/bin/{Path(str(path)).name}", *re.findall(r"(/\S+) \(", libraries)):
            (place / "image" / each[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(each, place / "image" / each[1:])
    with (place / "disk").open("wb") as file:
        file.truncate(80 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", place / "disk"], check=True)
    if subprocess.run(["mount", "-o", "loop", place / "disk", place / "data"]).returncode != 0:
        pytest.skip("needs a loop device")
    url, places = f"unix://{place}/sock", {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    options = [f"--{option}={place / name}" for option, name in places.items()]
    process = subprocess.Popen(
        # Without a bridge an engine deletes docker0, another engine's too: here it sees none.
        ["unshare", "--net", "dockerd", "--host", url, "--bridge", "none", "--iptables=false", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        archive = subprocess.run(["tar", "c", "-C", place / "image", "."], capture_output=True, check=True)
        loading = ["docker", "--host", url, "import", "-", "tiny"]

        def is_loaded() -> bool:
            assert process.poll() is None, "the engine ended"
            return subprocess.run(loading, input=archive.stdout, capture_output=True).returncode == 0

        wait_for(is_loaded, 60.0, "an answer of the engine", every_s=0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        subprocess.run(["umount", "-l", place / "data"], check=True)
        shutil.rmtree(place)


def test_a_job_that_filled_the_disk_of_its_engine_is_preempted_and_stopped_once(engine: str) -> None:
    with closing(DockerLauncher(JobPlace("docker", engine))) as launcher:
        options = {"network_mode": "none"}
        command = f"trap 'touch /filler; sleep 1; exit 7' TERM; {FILL}; while :; do sleep 0.1; done"
        job = Job("fills-1", ("sh", "-c", command), image="tiny", container=options)
        for ends in ("preempted", "stopped"):
            launcher.start(job)
            data = Path(engine.removeprefix("unix://")).parent / "data"
            wait_for(lambda data=data: os.statvfs(data).f_bavail == 0, 60)  # type: ignore[misc]
            if ends == "preempted":
                assert launcher.preempt(job.key, 30.0, wait_s=20.0) == JobStatus(JobState.FINISHED, 7)
            launcher.stop(job.key, 0.0)
            assert launcher.status(job.key).state is JobState.ABSENT
            with pytest.raises(AlreadyEndedError):
                launcher.start(job)
            job = Job("fills-2", job.command, image="tiny", container=options)
