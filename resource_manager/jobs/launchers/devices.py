"""Environment that makes only its own GPUs visible to a job, by vendor."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.jobs.launchers.base import Job, LauncherError

VISIBLE_DEVICES: Mapping[str, str] = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "ROCR_VISIBLE_DEVICES",
    "ascend": "ASCEND_RT_VISIBLE_DEVICES",
}
"""Environment variable that a vendor's runtime reads, by vendor."""

DEVICE_FILES: Mapping[str, Sequence[str]] = {
    "amd": ("/dev/kfd", "/dev/dri"),
    "ascend": ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
}
"""Device files that a container needs beside its GPUs', by vendor; NVIDIA's engine plugin adds its own."""


MPS_MARK = "nvidia-cuda-mps-control.pid"
"""File that an MPS daemon writes into the folder of its pipes."""

MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Environment variable that limits a program of MPS to a part of the GPU."""

MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable that says where a program finds its MPS daemon."""

MPS_WAIT_S = 20
"""Time for which a job waits for its MPS daemon: the agent learns of the lease when it reports next."""

NOT_ENFORCED = "its part of the GPU is accounted, not enforced: no MPS daemon runs"

_AWAIT_MPS = f"""
mark=${{CUDA_MPS_PIPE_DIRECTORY:-/nonexistent}}/{MPS_MARK} left={MPS_WAIT_S}
while [ "$CUDA_MPS_PIPE_DIRECTORY" ] && [ ! -s "$mark" ] && [ $left -gt 0 ]; do
    sleep 1
    left=$((left - 1))
done
[ -s "$mark" ] || echo "$GPU_LEASE_ID: {NOT_ENFORCED}" >&2
exec "$@"
"""


def with_share(command: Sequence[str]) -> list[str]:
    """Return the command of a job on a GPU fraction: it awaits its MPS daemon, and says if there is none."""
    return ["/bin/sh", "-c", _AWAIT_MPS, "sh", *command]


def await_share(environment: Mapping[str, str]) -> str:
    """Wait until the MPS daemon of a GPU fraction runs; return that there is none, empty if all is well."""
    if MPS_PERCENTAGE not in environment:
        return ""
    mark = Path(environment.get(MPS_PIPES, "/nonexistent")) / MPS_MARK
    until = time.monotonic() + (MPS_WAIT_S if MPS_PIPES in environment else 0)
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.5)
    return "" if mark.exists() else NOT_ENFORCED


def device_environment(
    vendor: str,
    gpu_ids: Sequence[int],
    gpu_uuids: Sequence[str] = (),
    *,
    gpu_milli: int = MILLI_PER_GPU,
    gpu_memory_mib: int = 0,
    mps_folder: str = "",
    renumbered: bool = False,
) -> dict[str, str]:
    """Return the environment for the whole GPUs `gpu_ids`, or for `gpu_milli` thousandths of one.

    NVIDIA's are named by `gpu_uuids` if they are given, which mean the same device whatever its number is.
    A GPU fraction is enforced by NVIDIA MPS alone, and only if the daemon in `mps_folder` runs, which a
    container does not reach; `gpu_memory_mib` is the fraction's part of the GPU's memory (0: unknown, no
    memory limit). Empty `gpu_ids` hide all GPUs.
    `renumbered` is for a container that has only these GPUs, whose runtime counts them from 0. Raises
    `LauncherError` for an unknown vendor.
    """
    try:
        variable = VISIBLE_DEVICES[vendor or "nvidia"]
    except KeyError:
        raise LauncherError(
            f"unknown GPU vendor {vendor!r}; known are {', '.join(VISIBLE_DEVICES)}"
        ) from None
    names = device_names(vendor, gpu_ids, gpu_uuids)
    devices = ",".join(names)
    counted = renumbered and names == list(map(str, gpu_ids))  # a UUID is the same inside a container
    environment = {variable: ",".join(map(str, range(len(gpu_ids)))) if counted else devices}
    if variable == "CUDA_VISIBLE_DEVICES":
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["NVIDIA_VISIBLE_DEVICES"] = devices or "void"
        if gpu_milli < MILLI_PER_GPU:
            environment[MPS_PERCENTAGE] = f"{gpu_milli / 10:g}"
            if gpu_memory_mib:
                environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={gpu_memory_mib}M"
            if mps_folder and not renumbered:
                environment[MPS_PIPES] = f"{mps_folder}/pipe"
    return environment


def device_names(vendor: str, gpu_ids: Sequence[int], gpu_uuids: Sequence[str]) -> list[str]:
    """Return what NVIDIA's runtime knows the GPUs by: their UUIDs if there are any; others know numbers."""
    by_uuid = gpu_uuids and vendor in ("nvidia", "")
    return list(gpu_uuids) if by_uuid else list(map(str, gpu_ids))


def device_files(vendor: str, gpu_ids: Sequence[int]) -> list[str]:
    """Return the device files of a container with these GPUs; none without GPUs or for NVIDIA."""
    if not gpu_ids:
        return []
    own = [f"/dev/davinci{gpu_id}" for gpu_id in gpu_ids] if vendor == "ascend" else []
    return [*DEVICE_FILES.get(vendor, ()), *own]


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise `LauncherError` for a variable that would be read as another one or be cut off."""
    for name, value in environment.items():
        if not name or "=" in name or "\0" in f"{name}{value}" or "\n" in name:
            raise LauncherError(
                f"env: {name!r} is not a valid variable name, or its value has a NUL character"
            )


def job_environment(job: Job, *, renumbered: bool = False) -> dict[str, str]:
    """Return the job's environment, with devices that the caller cannot override; raises `LauncherError`."""
    check_environment(job.environment)
    lease = {"GPU_LEASE_GPUS": ",".join(map(str, job.gpu_ids))}  # for people
    if job.gpu_uuids:
        lease["GPU_LEASE_UUIDS"] = ",".join(job.gpu_uuids)
    return {**job.environment, **devices_of(job, renumbered=renumbered), **lease}


def devices_of(job: Job, *, renumbered: bool = False) -> dict[str, str]:
    """Return the variables that make a job's devices visible to it."""
    return device_environment(
        job.vendor,
        job.gpu_ids,
        job.gpu_uuids,
        gpu_milli=job.gpu_milli,
        gpu_memory_mib=job.gpu_memory_mib,
        mps_folder=job.mps_folder,
        renumbered=renumbered,
    )
