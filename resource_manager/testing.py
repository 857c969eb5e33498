"""Pytest fixtures for tests of DAGs without servers: a manager in memory and a launcher that runs nothing.

pytest loads this module wherever the package is installed, so the fixtures import what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from resource_manager.core.models import Node
    from resource_manager.jobs.launchers.fake import FakeLauncher
    from resource_manager.manager.manager import GPUResourceManager


@pytest.fixture
def gpu_inventory() -> Iterable[Node] | str | Path | None:
    """Servers of `gpu_manager`, as nodes or the path of a TOML file; None: 4 servers x 8 GPUs x 64 CPUs.

    A project overrides this fixture to test its DAGs on its own servers.
    """
    return None


@pytest.fixture
def gpu_manager(
    gpu_inventory: Iterable[Node] | str | Path | None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GPUResourceManager]:
    """Manager on `memory://`, to which every GPU manager connection of the test's operators leads.

    Triggers fire without their usual pauses. The Airflow instance is called `test`. Every server counts as
    this machine, whatever its address.
    """
    from resource_manager.airflow import listener
    from resource_manager.airflow.hook import GPUManagerHook
    from resource_manager.airflow.operators import lease
    from resource_manager.airflow.task_trigger import base
    from resource_manager.jobs import reconcile
    from resource_manager.jobs.airflow_instance import instance_id
    from resource_manager.jobs.launchers import terminal
    from resource_manager.manager import lease_changes
    from resource_manager.manager.manager import GPUResourceManager

    with GPUResourceManager.from_url("memory://", inventory=gpu_inventory) as manager:
        monkeypatch.setattr(GPUManagerHook, "get_conn", lambda hook: manager)
        monkeypatch.setenv("GPU_MANAGER_INSTANCE", "test")
        is_here = terminal.is_here
        monkeypatch.setattr(terminal, "is_here", lambda address, *named: is_here("", *named))
        monkeypatch.setattr(reconcile, "ENDING_S", 0.0)
        monkeypatch.setattr(lease, "ENDING_S", 0.0)
        monkeypatch.setattr(base, "MIN_DEFERRAL_S", 0.0)
        monkeypatch.setattr(base, "POLL_S", 0.01)
        monkeypatch.setattr(base, "OUTAGE_POLL_S", 0.01)
        monkeypatch.setattr(lease_changes, "POLL_S", 0.01)
        listener.finish()
        instance_id.cache_clear()
        yield manager
        listener.finish()
        instance_id.cache_clear()


@pytest.fixture
def gpu_launcher(gpu_manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    """Launcher in place of all others; see `FakeLauncher` for what it records and how its jobs end."""
    from resource_manager.jobs.launchers import LAUNCHERS
    from resource_manager.jobs.launchers.fake import FakeLauncher

    launcher = FakeLauncher()
    for name in LAUNCHERS:
        monkeypatch.setitem(LAUNCHERS, name, lambda place: launcher)
    return launcher
