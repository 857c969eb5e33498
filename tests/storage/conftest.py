"""Stores under test, each as a function that opens another client of the same state."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from resource_manager.settings import Settings
from resource_manager.storage import MemoryStore, Store, open_store
from resource_manager.storage.airflow_variable.store import VariableStore
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.store import RedisStore
from resource_manager.storage.sql import mysql
from tests.sql_servers import DATABASES

OpenStore = Callable[[], Store]

STORES = os.environ.get(
    "STORES_UNDER_TEST",
    "memory fakeredis embedded_redis system_redis limited_embedded_redis limited_system_redis variable "
    f"sqlite {' '.join(DATABASES)} mariadb_as_mysql",
).split()
"""`limited_…`: as a Redis user with the rights that docs/stores.md recommends, like the Variable's lock.
`mariadb_as_mysql`: with the statements of MySQL, which few machines have.
`airflow` needs a process of its own, with a migrated database: see test_in_airflow."""


class Variables:
    """A stand-in for Airflow's Variables, as a store uses them."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.next_writes: list[Callable[[str, str, str | None], bool]] = []
        """What the next calls of `set` do instead of writing, in order."""

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def set(self, key: str, text: str, before: str | None) -> bool:
        act = self.next_writes.pop(0) if self.next_writes else self.write
        return act(key, text, before)

    def write(self, key: str, text: str, before: str | None) -> bool:
        if self.texts.get(key) != before:
            return False
        self.texts[key] = text
        return True

    def delete(self, key: str) -> None:
        self.texts.pop(key, None)


@pytest.fixture(params=STORES)
def open_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
    """Open clients of one empty state; Redis and Variable clients are independent of each other."""
    with ExitStack() as stack:
        if request.param == "memory":
            store = MemoryStore()
            yield lambda: store
        elif request.param == "variable":
            url, variables = request.getfixturevalue("embedded_redis").limited_url(), Variables()
            yield lambda: stack.enter_context(closing(VariableStore(variables, RedisClient.from_url(url))))
        elif request.param == "fakeredis":
            from tests.fake_redis import FakeRedis  # not where Airflow is tested, which runs this suite, too

            server = FakeRedis()
            yield lambda: stack.enter_context(closing(RedisStore(server.client())))
        elif request.param == "airflow":
            settings = Settings(redis_url=request.getfixturevalue("embedded_redis").fresh_url())
            url = f"airflow://contract_{uuid.uuid4().hex}"
            yield lambda: stack.enter_context(closing(open_store(url, settings)))
        elif request.param.startswith("limited_"):
            url = request.getfixturevalue(request.param.removeprefix("limited_")).limited_url()
            yield lambda: stack.enter_context(closing(open_store(url)))
        else:
            if request.param == "mariadb_as_mysql":
                monkeypatch.setattr(mysql, "has_blocks", lambda driver: False)
            url = request.getfixturevalue(request.param.removesuffix("_as_mysql")).fresh_url()
            yield lambda: stack.enter_context(closing(open_store(url)))
