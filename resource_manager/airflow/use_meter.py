"""Use of a lease's GPUs while its job runs, from what the servers report."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.results import Allocation
from resource_manager.manager.use_results import GpuUse, IdleWarning, ServerUse

LOOK_EVERY_S = 60.0
"""Time between two looks of a task's process at whether its lease is idle."""


def gpus_of(servers: Iterable[ServerUse], lease_id: str) -> list[GpuUse]:
    """Return the GPUs of the lease on these servers as they last reported them."""
    return [
        gpu
        for row in servers
        for gpu in row["gpus"]
        if any(lease["task_id"] == lease_id for lease in gpu["leases"])
    ]


def warn_when_idle(manager: LeaseService, allocation: Allocation, log: Any) -> threading.Event:
    """Watch the lease in a thread of this process, until the returned event is set or the process ends."""
    over = threading.Event()
    lease_id = allocation["task_id"]
    servers = list({member["server_name"] for member in allocation["members"]})

    def watch() -> None:
        warning = IdleWarning(log.warning)
        while not over.wait(LOOK_EVERY_S):
            try:
                warning.see(gpus_of(manager.gpus(servers), lease_id), lease_id)
            except Exception as error:  # the task goes on without a warning
                log.debug("the use of the GPUs is not known: %s", error)

    threading.Thread(target=watch, name="gpu-idle", daemon=True).start()
    return over


class UseMeter:
    """Mean utilization and peak memory of GPUs, over samples."""

    def __init__(self) -> None:
        self._samples = self._total_percent = 0
        self._peak_mib: int | None = None
        self._total_mib: int | None = None

    def add(self, gpus: Iterable[GpuUse]) -> None:
        """Add one sample of each GPU; what its server did not report is left out."""
        for gpu in gpus:
            if gpu["utilization_percent"] is not None:
                self._samples += 1
                self._total_percent += gpu["utilization_percent"]
            used = gpu["memory_used_mib"]
            if used is not None and used >= (self._peak_mib or 0):
                self._peak_mib, self._total_mib = used, gpu["memory_mib"]

    def summary(self) -> dict[str, Any] | None:
        """Return the figures of all samples, None without any; memory is that of the GPU that used most."""
        count = self._samples
        if not count and self._peak_mib is None:
            return None
        return {
            "samples": count,
            "mean_utilization_percent": round(self._total_percent / count, 1) if count else None,
            "peak_memory_mib": self._peak_mib,
            "memory_mib": self._total_mib,
        }


def usage_line(usage: Mapping[str, Any]) -> str:
    """Return `GPU use while this job ran: mean 71 %, peak memory 62 of 80 GB`, as far as it is known."""
    parts = []
    if usage["mean_utilization_percent"] is not None:
        parts.append(f"mean {usage['mean_utilization_percent']:.0f} %")
    if usage["peak_memory_mib"] is not None:
        total = f" of {usage['memory_mib'] / 1024:.0f}" if usage["memory_mib"] else ""
        parts.append(f"peak memory {usage['peak_memory_mib'] / 1024:.0f}{total} GB")
    return f"GPU use while this job ran: {', '.join(parts)}"
