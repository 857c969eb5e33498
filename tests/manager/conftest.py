"""The manager of tests that say nothing of its servers."""

from __future__ import annotations

import pytest

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.manager.cluster_file.servers import default_inventory
from tests.builders import Clock


@pytest.fixture
def manager(clock: Clock) -> GPUResourceManager:
    """Manager of one server of 8 GPUs."""
    store = MemoryStore(clock=clock)
    return GPUResourceManager(Settings(store="memory://"), store=store, inventory=default_inventory(1))
