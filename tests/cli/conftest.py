"""Commands of these tests, on a service and directly on the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from tests.cli.targets import Run, running_on


@pytest.fixture
def manager() -> GPUResourceManager:
    """Manager of the built-in servers; files with servers of their own have another."""
    return GPUResourceManager.from_url("memory://", policy="best_fit")


@pytest.fixture(params=["service", "store"])
def run(
    request: pytest.FixtureRequest,
    manager: GPUResourceManager,
    tmp_path: Path,
) -> Iterator[Run]:
    """Function `run("status", "--json")` that returns a command's result; the state is kept for the test."""
    with running_on(request.param, manager, tmp_path) as run:
        yield run
