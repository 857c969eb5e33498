"""Airflow provider: connection, hook, operators, sensor, decorator, triggers and listener."""

from __future__ import annotations

from typing import Any

INTEGRATION = "GPU resource manager"


def get_provider_info() -> dict[str, Any]:
    """Return the description that Airflow's provider manager reads."""
    from resource_manager import __version__
    from resource_manager.settings import AIRFLOW_SECTION, Settings

    def module(name: str, *parts: str) -> dict[str, Any]:
        root = f"resource_manager.airflow.{name}".removesuffix(".")
        names = [f"{root}.{part}" for part in parts] or [root]
        return {"integration-name": INTEGRATION, "python-modules": names}

    return {
        "package-name": "gpu-resource-manager",
        "name": INTEGRATION,
        "description": "Leases on named GPUs and CPUs for tasks.",
        "versions": [__version__],
        "integrations": [{"integration-name": INTEGRATION, "tags": ["service"]}],
        "connection-types": [
            {
                "connection-type": "gpu_manager",
                "hook-name": "GPU resource manager",
                "hook-class-name": "resource_manager.airflow.hook.GPUManagerHook",
                "ui-field-behaviour": {
                    "hidden-fields": ["port", "login", "schema"],
                    "relabeling": {
                        "host": "Store or service URL",
                        "password": "Password of the store, or token of the service",  # nosec B105  # pragma: allowlist secret
                    },
                    "placeholders": {"host": "postgresql://gpu_manager@db/gpus, redis://… or https://…"},
                },
            }
        ],
        "config": {
            AIRFLOW_SECTION: {
                "description": "The GPU resource manager; `GPU_MANAGER_*` in the environment comes first.",
                "options": {
                    name: {
                        "description": field.description,
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": None,
                        "default": None,
                        "sensitive": name in ("store", "redis_url", "job_keys"),
                    }
                    for name, field in Settings.model_fields.items()
                },
            }
        },
        "operators": [module("operators", "training", "lease", "reconcile")],
        "sensors": [module("sensors")],
        "hooks": [module("hook")],
        "triggers": [
            module(
                "",
                "task_trigger.trigger",
                "task_trigger.waits",
                "leased_operators.lease_keeping",
                "slurm.trigger",
            )
        ],
        "extra-links": ["resource_manager.airflow.links.ConsoleLink"],
        "task-decorators": [
            {"name": "gpu", "class-name": "resource_manager.airflow.decorators.gpu.gpu_task"}
        ],
    }
