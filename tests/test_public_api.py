"""The public names exist, and the core needs only pydantic and redis."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import resource_manager
from resource_manager import GPUResourceManager
from resource_manager.scheduling.placement.policies import POLICIES, get_policy

MANAGER_METHODS = {
    *("allocate_resources", "release_resources", "get_resource_summary", "reset_resources", "allocate_batch"),
    *("allocate", "submit", "cancel", "renew", "explain", "history", "drain", "resume", "from_url"),
}
HEAVY = {"airflow", "flask", "click", "rich", "numpy", "scipy", "matplotlib", "prometheus_client"}


def test_public_names() -> None:
    expected = {
        "AsyncGPUResourceManager",
        "Demand",
        "GPUResourceManager",
        "Lease",
        "MemoryStore",
        "RedisStore",
        "Refusal",
        "Request",
        "ResourceManagerError",
        "Settings",
        "VariableStore",
    }
    assert set(resource_manager.__all__) == expected
    assert all(hasattr(resource_manager, name) for name in expected)
    assert all(callable(getattr(GPUResourceManager, name)) for name in MANAGER_METHODS)
    assert (
        GPUResourceManager.TOTAL_SERVERS,
        GPUResourceManager.GPUS_PER_SERVER,
        GPUResourceManager.CPUS_PER_SERVER,
        GPUResourceManager.RESOURCE_VAR_NAME,
        GPUResourceManager.LOCK_VAR_NAME,
    ) == (4, 8, 64, "gpu_resource_status", "gpu_resource_lock")


def test_policies_by_name() -> None:
    expected = {
        "first_fit",
        "best_fit",
        "round_robin",
        "least_loaded",
        "glb",
        "fgd",
        "dot_product",
        "gpu_packing",
        "gpu_clustering",
        "random",
    }
    assert expected <= set(POLICIES)
    assert all(get_policy(name) is POLICIES[name] for name in expected)
    with pytest.raises(resource_manager.ResourceManagerError, match="unknown policy 'nonsense'; known are"):
        get_policy("nonsense")


def test_the_core_loads_nothing_heavy() -> None:
    code = f"import sys, resource_manager; print(sorted({HEAVY} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "use",
    [
        "import resource_manager.rest.client, resource_manager.cli.attended",
        "from resource_manager import GPUResourceManager as M; M.from_url('memory://').servers()",
        "from resource_manager import GPUResourceManager as M; M.from_url('sqlite:///{folder}/s.db').servers()",
    ],
)
def test_the_driver_of_redis_is_loaded_for_redis_only(use: str, tmp_path: Path) -> None:
    code = f"import sys; {use.format(folder=tmp_path)}; print('redis' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
