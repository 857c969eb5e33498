"""Stores under test, each as a function that opens another client of the same state."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial

import pytest

from resource_manager.settings import Settings
from resource_manager.storage import MemoryStore, Store, open_store
from resource_manager.storage.airflow_variable import DEFAULT_VARIABLE
from resource_manager.storage.airflow_variable.access import variable_access
from resource_manager.storage.airflow_variable.store import VariableStore
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.store import RedisStore
from resource_manager.storage.sql import mysql
from tests.redis_server import RedisServer
from tests.sql_servers import DATABASES
from tests.storage.dumps import dump_of_database, dump_of_keys, dump_of_redis, dump_of_variable

OpenStore = Callable[[], Store]
TakeDump = Callable[[], Callable[[], None]]
"""Take a dump of the state by the means of its server; the answer brings it back."""

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


Opened = tuple[OpenStore, TakeDump | None]


@pytest.fixture
def open_client(state: Opened) -> OpenStore:
    """Open clients of one empty state; Redis and Variable clients are independent of each other."""
    return state[0]


@pytest.fixture
def take_dump(state: Opened) -> TakeDump:
    if state[1] is None:
        pytest.skip("it ends with its process: there is no dump of it")
    return state[1]


@pytest.fixture(params=STORES)
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with ExitStack() as stack:

        def opening(make: OpenStore) -> OpenStore:
            return lambda: stack.enter_context(closing(make()))

        if request.param == "memory":
            store = MemoryStore()
            yield lambda: store, None
        elif request.param == "variable":
            server, variables = request.getfixturevalue("embedded_redis"), Variables()
            url = server.limited_url()
            keys = partial(dump_of_redis, as_admin(server, url))
            yield (
                opening(lambda: VariableStore(variables, RedisClient.from_url(url))),
                lambda: dump_of_variable(variables, DEFAULT_VARIABLE, keys),
            )
        elif request.param == "fakeredis":
            from tests.fake_redis import FakeRedis  # not where Airflow is tested, which runs this suite, too

            fake = FakeRedis()
            yield (
                opening(lambda: RedisStore(fake.client())),
                lambda: dump_of_keys(lambda: fake.client().driver, "*"),
            )
        elif request.param == "airflow":
            redis_url = request.getfixturevalue("embedded_redis").fresh_url()
            name = f"contract_{uuid.uuid4().hex}"
            yield (
                opening(lambda: open_store(f"airflow://{name}", Settings(redis_url=redis_url))),
                lambda: dump_of_variable(variable_access(), name, partial(dump_of_redis, redis_url)),
            )
        elif request.param.startswith("limited_"):
            server = request.getfixturevalue(request.param.removeprefix("limited_"))
            url = server.limited_url()
            yield opening(lambda: open_store(url)), partial(dump_of_redis, as_admin(server, url))
        else:
            if request.param == "mariadb_as_mysql":
                monkeypatch.setattr(mysql, "has_blocks", lambda driver: False)
            url = request.getfixturevalue(request.param.removesuffix("_as_mysql")).fresh_url()
            take = dump_of_redis if request.param.endswith("redis") else dump_of_database
            yield opening(lambda: open_store(url)), partial(take, url)


def as_admin(server: RedisServer, url: str) -> str:
    return f"{server.url}?{url.partition('?')[2]}"
