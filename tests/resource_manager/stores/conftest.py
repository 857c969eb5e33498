"""The stores under test, each as a function that opens one more client of the same state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resource_manager.stores import MemoryStore, Store

OpenStore = Callable[[], Store]


@pytest.fixture(params=["memory"])
def open_client(request: pytest.FixtureRequest) -> OpenStore:
    """Opens clients of one empty state; Redis and Variable clients are independent of each other."""
    store = MemoryStore()
    return lambda: store
