"""Fixtures: a service on a memory store, and clients that call it in each role."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, Settings
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, persistence_of, standalone
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.builders import Clock


@pytest.fixture
def kept(tmp_path: Path) -> Persistence:
    return persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")


@pytest.fixture
def manager_class() -> type[GPUResourceManager]:
    """Class of `manager`, which a test may replace by one of its own."""
    return GPUResourceManager


@pytest.fixture
def manager(manager_class: type[GPUResourceManager]) -> Iterator[GPUResourceManager]:
    with manager_class.from_url("memory://") as manager:
        yield manager


@pytest.fixture
def clock() -> Clock:
    """Return the clock of `service`, for its tokens and limits; it begins now and stands still."""
    clock = Clock()
    clock.now = time.time()
    return clock


@pytest.fixture
def service(manager: GPUResourceManager, kept: Persistence, clock: Clock) -> Iterator[Service]:
    service = standalone(manager, kept, clock=clock)
    yield service
    service.watch.close()


@pytest.fixture
def open_client(manager: GPUResourceManager, kept: Persistence) -> Iterator[FlaskClient]:
    """Yield a client of a service without tokens, as started on a laptop."""
    service = standalone(manager, kept, open_to="loopback")
    yield create_app(service).test_client()
    service.watch.close()


@pytest.fixture
def as_role(service: Service, kept: Persistence) -> Callable[..., FlaskClient]:
    """Return as_role(Role.USER, name="ada"): a client that sends a token of ada; with None, no token."""
    app = create_app(service)

    def client(role: Role | None, name: str = "") -> FlaskClient:
        made = app.test_client()
        if role is not None:
            server = "gpu-server-0" if role is Role.AGENT else ""
            text = tokens.create(kept.tokens, name or str(role), role, server=server)
            made.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
        return made

    return client
