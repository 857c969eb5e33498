"""A process that names an old inventory file changes nothing of the stored cluster, however it comes."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, Refusal, Settings
from resource_manager.cli import main
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.auth import Identity
from resource_manager.rest.tokens import Role, create
from tests.redis_server import RedisServer
from tests.sql_servers import Postgres

OLD = '[[servers]]\nname = "gpu-server-0"\ngpus = 8\ncpus = 64\n'
NOT_NOW = 1
"""Exit code of `explain` where the request would not be granted now."""


@pytest.fixture(params=["redis", "postgresql", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "redis":
            redis: RedisServer = request.getfixturevalue("embedded_redis")
            return redis.fresh_url()
        case "postgresql":
            postgresql: Postgres = request.getfixturevalue("postgresql")
            return postgresql.fresh_url()
        case _:
            return f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def manager(url: str) -> Iterator[GPUResourceManager]:
    """Yield a manager with a drained server, a closed GPU on the other, and a request that waits for both."""
    with GPUResourceManager.from_url(url, inventory=default_inventory(2)) as manager:
        manager.drain("gpu-server-1", reason="RMA, do not use")
        manager.drain("gpu-server-0", gpu=3, reason="row remap failed")
        manager.submit("waits", 8)
        yield manager


@pytest.fixture
def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    monkeypatch.setenv("GPU_MANAGER_INVENTORY", str(path))
    return path


def services(url: str, number: int) -> Iterator[tuple[FlaskClient, dict[str, str]]]:
    """Yield clients of services that open the store, each after the one before has ended."""
    for _ in range(number):
        with GPUResourceManager(Settings.load({**os.environ, "GPU_MANAGER_STORE": url})) as manager:
            kept = persistence_of(manager.settings)
            token = create(kept.tokens, "olga", Role.OPERATOR)
            service = standalone(manager, kept)
            yield create_app(service).test_client(), {"Authorization": f"Bearer {token}"}
            service.watch.close()


def test_services_and_their_restarts(url: str, manager: GPUResourceManager, old_file: Path) -> None:
    before = manager.snapshot()
    for client, headers in services(url, 3):
        text = client.get("/api/status", headers=headers).get_data(as_text=True)
        assert "RMA, do not use" in text
        assert "waits" in client.get("/api/queue", headers=headers).get_data(as_text=True)
        body = {"task_id": "t", "required_gpus": 8, "required_cpus": 8}
        assert client.post("/api/allocate", json=body, headers=headers).status_code == 503
        assert manager.snapshot() == before


def test_commands(url: str, manager: GPUResourceManager, old_file: Path) -> None:
    before = manager.snapshot()
    for command, code in (("status", 0), ("queue", 0), ("top --once", 0), ("explain --gpus 8", NOT_NOW)):
        done = CliRunner().invoke(main, command.split(), env={"GPU_MANAGER_STORE": url})
        assert done.exit_code == code, done.output
    assert manager.snapshot() == before


def test_pages_and_tasks_of_airflow(
    url: str, manager: GPUResourceManager, old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Airflow's own, on import
        from resource_manager.airflow import webapp

    async def operator(request: object) -> Identity:
        return Identity("olga", Role.OPERATOR)

    async def ask(method: str, path: str, **more: object) -> httpx.Response:
        with closing(webapp.Gate(operator, instance_of=lambda: "test")) as gate:
            transport = httpx.ASGITransport(app=gate)
            async with httpx.AsyncClient(transport=transport, base_url="http://airflow") as client:
                return await client.request(method, path, **more)  # type: ignore[arg-type]

    connection = {"conn_type": "gpu_manager", "host": url}
    monkeypatch.setenv("AIRFLOW_CONN_GPU_MANAGER_DEFAULT", json.dumps(connection))
    before = manager.snapshot()
    for _ in range(2):
        assert "RMA, do not use" in asyncio.run(ask("GET", "/api/status")).text
        body = {"task_id": "t", "required_gpus": 8, "required_cpus": 8}
        assert asyncio.run(ask("POST", "/api/allocate", json=body)).status_code == 503
    with webapp.manager_of_tasks() as of_task:
        assert isinstance(of_task.allocate("t", 8), Refusal)
    assert manager.snapshot() == before
