"""The Airflow provider: connection, hook, operators, sensor, triggers and listener."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """What Airflow's provider manager reads."""
    from resource_manager import __version__

    return {
        "package-name": "gpu-resource-manager",
        "name": "GPU resource manager",
        "description": "Leases on named GPUs and CPUs for tasks.",
        "versions": [__version__],
        "connection-types": [
            {
                "connection-type": "gpu_manager",
                "hook-class-name": "resource_manager.provider.hook.GPUManagerHook",
            }
        ],
        "extra-links": ["resource_manager.provider.links.ConsoleLink"],
    }
