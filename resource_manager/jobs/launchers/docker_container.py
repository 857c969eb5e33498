"""Container of a job: its environment, files, volumes and host options, GPUs among them."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping
from typing import Any

from resource_manager.jobs.launchers.base import Job
from resource_manager.jobs.launchers.devices import device_files, device_names, job_environment
from resource_manager.jobs.launchers.docker_volumes import volume_of

PREEMPT_FILE = "GPU_PREEMPT_FILE"
OWN_DIRECTORY = "/var/lib/gpu-manager/job"
"""The job's own directory: a volume that stays for the next lease of the id, until a job has succeeded."""


def environment_of(job: Job) -> dict[str, str]:
    environment = job_environment(job, renumbered=job.vendor != "amd")
    if job.vendor == "ascend":
        environment["ASCEND_VISIBLE_DEVICES"] = ",".join(map(str, job.gpu_ids))
    environment.update({variable: f"/{_path(variable)}" for variable in job.files})
    own = {"GPU_JOB_DIR": OWN_DIRECTORY, "GPU_CHECKPOINT_FILE": f"{OWN_DIRECTORY}/checkpoint"}
    return environment | own | mark_of(job.key) | preempt_file()


def mark_of(key: str) -> dict[str, str]:
    """Return the variable by which the agent of a server knows the job of a process, also on no GPU."""
    return {"GPU_JOB_LOCK": f"/{key}/lock"}


def preempt_file() -> dict[str, str]:
    """Return the variable that names the file that appears once the job is told that its lease is taken."""
    return {PREEMPT_FILE: f"/{_path(PREEMPT_FILE)}"}


def host_options(job: Job, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the host options, those of the job's `container` before ours, on an engine that says that.

    All GPUs are in one device request, since the engine uses only the first.
    """
    from docker.utils import convert_volume_binds

    options: dict[str, Any] = {"init": True}
    if job.cpus:
        options["nano_cpus"] = int(min(job.cpus, engine["NCPU"]) * 1e9)
    if requests := device_requests(job, engine):
        options["device_requests"] = requests
    elif files := device_files(job.vendor, job.gpu_ids):
        options["devices"] = [f"{path}:{path}:rwm" for path in files]
    options |= job.container
    options.pop("auto_remove", None)  # `stop` does it: before, the container is what tells that the job ran
    options.pop("restart_policy", None)  # the GPUs of a job that has ended may be others'
    # They may be a dict of paths, too.
    binds = convert_volume_binds(options.get("binds") or [])
    options["binds"] = [*binds, f"{volume_of(job.key)}:{OWN_DIRECTORY}:rw"]
    return options


def device_requests(job: Job, engine: Mapping[str, Any]) -> list[Any]:
    """Return the request for NVIDIA's GPUs, by CDI names where the engine, as it said, knows them.

    It says so since Docker 28.3; before, those of an engine without a runtime of NVIDIA's are taken for
    known. Containers with CDI names keep their GPUs when systemd reads its units again.
    """
    if not job.gpu_ids or job.vendor not in ("nvidia", ""):
        return []
    from docker.types import DeviceRequest

    names = device_names(job.vendor, job.gpu_ids, job.gpu_uuids)
    devices = [f"nvidia.com/gpu={name}" for name in names]
    known = {device["ID"] for device in engine.get("DiscoveredDevices") or [] if device["Source"] == "cdi"}
    if known.issuperset(devices) or (
        engine.get("CDISpecDirs") and "nvidia" not in engine.get("Runtimes", {})
    ):
        return [DeviceRequest(driver="cdi", device_ids=devices)]
    return [DeviceRequest(device_ids=names, capabilities=[["gpu"]])]


def archive_of(files: Mapping[str, str]) -> bytes:
    """Return a tar archive of the job's files, with the folders above them."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for variable, text in files.items():
            entry = tarfile.TarInfo(_path(variable))
            entry.size, entry.mode, entry.mtime = len(data := text.encode()), 0o644, time.time()
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _path(variable: str) -> str:
    """Return the path in a container, without its first slash, of the file that a variable names."""
    return f"var/lib/gpu-manager/{variable.lower()}"
