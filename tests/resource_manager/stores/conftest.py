"""The stores under test, each as a function that opens one more client of the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from resource_manager.stores import MemoryStore, Store, open_store

OpenStore = Callable[[], Store]


@pytest.fixture(params=["memory", "embedded_redis", "system_redis"])
def open_client(request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Opens clients of one empty state; Redis and Variable clients are independent of each other."""
    if request.param == "memory":
        store = MemoryStore()
        yield lambda: store
        return
    url = request.getfixturevalue(request.param).fresh_url()
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(open_store(url)))
