"""Tokens, cached answers and the session secret in a real Redis, shared by the services of one store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resource_manager import GPUResourceManager, Settings
from resource_manager.errors import StoreUnavailableError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, shared_tokens, standalone
from resource_manager.rest.tokens import Role
from resource_manager.storage.redis.client import RedisClient
from tests.redis_server import RedisServer

BODY = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}


@pytest.fixture
def url(embedded_redis: RedisServer) -> str:
    return embedded_redis.fresh_url()


@pytest.fixture
def services(url: str) -> Iterator[list[Any]]:
    """Yield clients of two services on one store, as on two machines."""
    with (
        GPUResourceManager.from_url(url, inventory=default_inventory()) as first,
        GPUResourceManager.from_url(url) as second,
    ):
        made = [standalone(manager, persistence_of(manager.settings)) for manager in (first, second)]
        yield [create_app(service).test_client() for service in made]
        for service in made:
            service.watch.close()


def test_services_share_tokens_sessions_and_answers(services: list[Any], url: str) -> None:
    kept = persistence_of(Settings(store=url)).tokens
    headers = {
        "Authorization": f"Bearer {tokens.create(kept, 'ada', Role.OPERATOR)}",
        "Idempotency-Key": "once",
    }
    one, two = services
    first = one.post("/api/allocate", json=BODY, headers=headers)
    again = two.post("/api/allocate", json=BODY, headers=headers)
    assert first.status_code == 200
    assert again.json == first.json
    assert again.headers["Idempotent-Replay"] == "true"
    assert one.application.secret_key == two.application.secret_key
    assert two.get("/api/leases", headers=headers).json["items"][0]["task_id"] == "t"
    for token_id in kept.read():
        assert kept.delete(token_id)
    assert kept.read() == {}


def test_a_state_in_a_variable_moves_with_the_tokens_in_the_redis_of_its_lock(url: str) -> None:
    """A backup had none of them: after the move every user and agent was refused."""
    settings = Settings(store="airflow://", redis_url=url)
    tokens.create(persistence_of(settings).tokens, "ada", Role.OPERATOR)
    shared = shared_tokens(settings)
    assert shared is not None
    assert [token.name for token in shared.read().values()] == ["ada"]
    assert shared_tokens(Settings(store="memory://")) is None


def test_a_secret_that_redis_lost_is_stored_again_by_a_service_that_knows_it(url: str) -> None:
    kept = persistence_of(Settings(store=url))
    client = RedisClient.from_url(url)
    client.driver.delete(client.key("session-secret"))
    kept.keep_secret()
    assert persistence_of(Settings(store=url)).secret == kept.secret


def test_an_unreachable_redis_is_reported() -> None:
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        persistence_of(Settings(store="redis://127.0.0.1:1"))


@pytest.mark.parametrize(
    "row",
    [
        *("", "[]", "{}", "[" * 10_000, '{"token_id": "x", "scope": "of a newer version"}'),
        '{"token_id": "x", "name": "bob", "role": "of a newer version", "digest": "", "created_at": 0.0}',
        '{"token_id": "x", "name": 7, "role": "user", "digest": "", "created_at": 0.0}',
    ],
)
def test_a_token_that_cannot_be_read_shuts_nobody_else_out(services: list[Any], url: str, row: str) -> None:
    """As while two versions of the service run, of which one wrote it."""
    kept = persistence_of(Settings(store=url)).tokens
    headers = {"Authorization": f"Bearer {tokens.create(kept, 'ada', Role.READER)}"}
    client = RedisClient.from_url(url)
    client.driver.hset(client.key("tokens"), "x", row)
    assert services[0].get("/api/status", headers=headers).status_code == 200
    assert [token.name for token in kept.read().values()] == ["ada"]
    client.close()
