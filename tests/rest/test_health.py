"""Health checks on real stores: live, ready, and what a stranger learns when the store is gone or closed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, Settings
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.tokens import Role, create
from resource_manager.storage.backup import restore, write_backup
from tests.builders import Clock
from tests.redis_server import RedisServer
from tests.rest.test_roles import HEALTH
from tests.sql_servers import Postgres, running_sql


@pytest.fixture
def own_postgresql() -> Iterator[Postgres]:
    """A PostgreSQL for one test, which may stop it."""
    with running_sql(Postgres) as server:
        yield server


def damage(file: Path) -> None:
    for part in file.parent.glob(f"{file.name}*"):
        part.write_bytes(b"not a database")


@pytest.fixture(params=["redis", "postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], object]]:
    """Return the URL of a store, and a function that takes it away."""
    match request.param:
        case "redis":
            redis: RedisServer = request.getfixturevalue("own_redis")
            return redis.limited_url(), lambda: redis.stop(signal.SIGKILL)
        case "postgresql":
            postgresql: Postgres = request.getfixturevalue("own_postgresql")
            return postgresql.url, postgresql.kill
        case _:
            file = tmp_path / "gpus-of-ada.db"
            return f"sqlite:///{file}", lambda: damage(file)


@pytest.fixture
def manager(store: tuple[str, Callable[[], object]]) -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url(store[0], inventory=default_inventory()) as manager:
        yield manager


@pytest.fixture
def stranger(manager: GPUResourceManager) -> Iterator[FlaskClient]:
    """Yield a client without a token of a service whose tokens are in the store, and read each time."""
    kept = persistence_of(Settings(store=manager.settings.store))
    create(kept.tokens, "olga", Role.OPERATOR)
    service = standalone(manager, kept, clock=Clock(step_s=60.0))
    yield create_app(service).test_client()
    service.watch.close()


def statuses(client: FlaskClient) -> list[int]:
    return [client.get(path).status_code for path in HEALTH]


def test_a_service_is_live_without_its_store_and_ready_only_with_it(
    store: tuple[str, Callable[[], object]], stranger: FlaskClient
) -> None:
    assert statuses(stranger) == [200, 200, 200]
    store[1]()
    assert statuses(stranger) == [200, 503, 503]
    assert int(stranger.get("/readyz").headers["Retry-After"]) > 0


def test_a_closed_store_is_not_ready_until_its_final_backup_is_restored(
    manager: GPUResourceManager, stranger: FlaskClient, tmp_path: Path
) -> None:
    backup = write_backup(
        manager.store, tmp_path / "f", closing="closed: it goes on in postgresql://ada@db.internal/gpus"
    )
    assert statuses(stranger) == [200, 503, 503]
    assert "db.internal" not in stranger.get("/healthz").get_data(as_text=True)
    restore(manager.store, backup)
    assert statuses(stranger) == [200, 200, 200]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer gpm_1_2"}], ids=["nobody", "wrong token"])
def test_no_answer_to_a_stranger_names_the_store(
    store: tuple[str, Callable[[], object]], stranger: FlaskClient, headers: dict[str, str]
) -> None:
    store[1]()
    place = store[0].partition("://")[2].partition("?")[0]
    for path in (*HEALTH, "/api/status", "/metrics", "/login", "/"):
        text = stranger.get(path, headers=headers).get_data(as_text=True)
        assert not any(part in text for part in place.replace("@", "/").split("/") if len(part) > 3), text
    answer = stranger.post("/login", data={"token": "gpm_1_2"}, headers=headers)
    assert answer.status_code == 503
    assert "see the log of the service" in answer.get_data(as_text=True)
    assert place not in answer.get_data(as_text=True)
