"""Reports for tests: of a server with GPUs that are idle and healthy unless said otherwise."""

from __future__ import annotations

import json
from typing import Any

from resource_manager.agent.probe import gpu_of
from resource_manager.core.models import Gpu, Node


def uuid(number: int) -> str:
    return f"GPU-8f6a2c1e-0000-4000-8000-{number:012d}"


def server(name: str = "gpu-a", gpus: int = 2) -> Node:
    """Return a node that pins the UUIDs 0, 1, …"""
    return Node(name, 0, {"cpus": 64}, tuple(Gpu(n, "A100", uuid=uuid(n)) for n in range(gpus)))


def process(pid: int = 77, **known: Any) -> dict[str, Any]:
    """Return a process that belongs to nobody."""
    return {
        "pid": pid,
        "user": "eve",
        "command": "python mine.py",
        "memory_mib": 500,
        "lease_id": None,
        "job": None,
        "lease_source": "none",
        **known,
    }


def gpu(number: int, **known: Any) -> dict[str, Any]:
    """Return the report of a GPU; `number` gives its UUID, its index is set by its place in the report."""
    whole = {
        "uuid": uuid(number),
        "type": "A100",
        "memory_mib": 81920,
        "memory_used_mib": 0,
        "utilization_percent": 0,
        "processes": [],
    }
    return gpu_of(number, **{**whole, **known})


def report(at: float, *gpus: dict[str, Any], name: str = "gpu-a", **known: Any) -> dict[str, Any]:
    """Return a report made at that time by the server's clock, and as long after its start."""
    return {
        "format": 1,
        "server": name,
        "hostname": name,
        "at": at,
        "boot_id": "boot-1",
        "uptime_s": at,
        "source": "nvml",
        "error": None,
        "driver": "550.54.15",
        "gpus": [{**gpu, "index": place} for place, gpu in enumerate(gpus)],
        "cpus": 64,
        "load_1m": 0.5,
        "memory_mib": 515000,
        "memory_available_mib": 400000,
        "disk_free_mib": 1000,
        "interval_s": 10.0,
        **known,
    }


def as_text(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
