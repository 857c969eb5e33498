"""`build_docker_cmd`: command line that runs an image on granted GPUs (original design, section 4.1)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.jobs.launchers.base import LauncherError, job_key
from resource_manager.jobs.launchers.devices import (
    check_environment,
    device_environment,
    device_files,
    device_names,
)
from resource_manager.jobs.launchers.docker_container import mark_of


def build_docker_cmd(
    allocation: Mapping[str, Any],
    image: str,
    command: str | Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    volumes: Sequence[str] = (),
    options: Sequence[str] = (),
) -> str:
    """Return a `docker run` for any POSIX shell, such as that of `SSHOperator` or `BashOperator`.

    `allocation` is the value of `allocate_resources`; `volumes` are `host:container`, `options` further
    arguments for `docker run`. The container is named after the lease, so a lease cannot start two. Raises
    `LauncherError` for an image that `docker` would read as an option.
    """
    if not image or image.startswith("-"):
        raise LauncherError(f"image must begin with a letter or digit, got {image!r}")
    check_environment(env or {})
    gpu_ids, gpu_uuids = allocation["gpu_ids"], allocation.get("gpu_uuids", ())
    name = job_key(allocation["task_id"], allocation.get("fencing_token", 0))
    words = ["docker", "run", "--rm", "--init", "--name", name]
    words += ["--label", f"gpu-manager.task_id={allocation['task_id']}"]
    if allocation["cpu_count"]:
        words += ["--cpus", str(allocation["cpu_count"])]
    vendor = allocation.get("vendor", "nvidia") or "nvidia"
    if gpu_ids and vendor == "nvidia":
        # The inner quotes are for Docker, which splits an unquoted value at commas.
        words += ["--gpus", f'"device={",".join(device_names(vendor, gpu_ids, gpu_uuids))}"']
    for path in device_files(vendor, gpu_ids):
        words += ["--device", path]
    environment = {
        **(env or {}),
        **device_environment(
            vendor,
            gpu_ids,
            gpu_uuids,
            gpu_milli=allocation.get("gpu_milli", MILLI_PER_GPU),
            gpu_memory_mib=allocation.get("gpu_memory_mib", 0),
            renumbered=vendor != "amd",
        ),
        "GPU_LEASE_ID": allocation["task_id"],
        **(mark_of(name) if "fencing_token" in allocation else {}),
    }
    for variable, value in environment.items():
        words += ["--env", f"{variable}={value}"]
    for volume in volumes:
        words += ["--volume", volume]
    words += [*options, image, *(shlex.split(command) if isinstance(command, str) else command)]
    return shlex.join(words)
