"""Names in a real Redis: data in fields and arguments, never keys, scripts or patterns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.errors import SettingsError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.forecasts import RECORD
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.store import PARTS
from tests.security import hostile


@pytest.fixture
def redis(own_redis: Any) -> Iterator[Any]:
    with own_redis.client() as client:
        client.set("precious", "kept")
        yield client
        assert client.get("precious") == b"kept"


def test_hostile_task_ids_stay_in_their_fields(own_redis: Any, redis: Any) -> None:
    with GPUResourceManager.from_url(
        f"{own_redis.url}?namespace=mine", inventory=default_inventory()
    ) as manager:
        for name in hostile.NAMES:
            lease = manager.allocate_resources(name, 2, 1, team=name, owner=name, labels={name: name})
            assert lease is not None
            assert lease["task_id"] == name
            assert manager.status_of(name)["labels"] == {name: name}  # type: ignore[index]
            assert manager.renew(name)["task_id"] == name
            assert manager.release_resources(name, outcome=name)
        for number in range(4):
            manager.allocate_resources(f"fill-{number}", 8, 1)
        for name in hostile.NAMES:
            assert manager.submit(name, 8, 1)["state"] == "WAITING"
        assert {entry["task_id"] for entry in manager.queue()} == set(hostile.NAMES)
        for name in hostile.NAMES:
            assert manager.cancel(name, reason=name)
        manager.drain(0, reason=hostile.SHELL[0])
    keys = {key.decode() for key in redis.keys("*")} - {"precious"}
    names = {key.removeprefix("{mine}:") for key in keys}
    beside = {f"report:{RECORD}", f"report-record:{RECORD}", "witnesses"}
    assert {name for name in names if not name.startswith("lock")} <= {*PARTS, *beside}
    assert {"meta", "inventory", "changes", "drained"} <= names


def test_one_namespace_does_not_reach_into_another(own_redis: Any, redis: Any) -> None:
    with (
        GPUResourceManager.from_url(f"{own_redis.url}?namespace=a", inventory=default_inventory()) as first,
        GPUResourceManager.from_url(
            f"{own_redis.url}?namespace=a:leases", inventory=default_inventory()
        ) as second,
    ):
        first.allocate_resources("t", 8, 1)
        assert second.status_of("t") is None
        second.reset_resources()
        assert first.status_of("t") is not None


@pytest.mark.parametrize("namespace", ["a}b", "{a", "a b", "a%0Ab", "a*", "%7Ba", "a%00"])
def test_a_namespace_with_special_characters_is_refused(namespace: str) -> None:
    with pytest.raises(SettingsError, match="namespace") as caught:
        RedisClient.from_url(f"redis://localhost?namespace={namespace}")
    assert str(caught.value).isprintable()
