"""What is kept in Redis for a time goes by itself, also where nobody comes back to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from resource_manager.core.changes import Cancelled, Queued
from resource_manager.core.models import Request
from resource_manager.rest.redis_persistence import RedisSessions
from resource_manager.rest.sessions import SESSION_LIFE_S
from resource_manager.storage import open_store
from resource_manager.storage.clock import Reading
from resource_manager.storage.jobs import LIVE_S, JobRow
from resource_manager.storage.once import KEEP_S, Once
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.store import RedisStore
from resource_manager.storage.reports import RECORD_TTL_S, Sighting
from tests.redis_server import RedisServer
from tests.storage.walk import granted, started

CALLER = Once("ada", "", "").caller


def use(url: str, keys: Sequence[str]) -> None:
    """Keep something of every kind."""
    with closing(open_store(url)) as store:
        cluster = started(store)
        once = [(Once("ada", key, "f"), "1") for key in keys]
        jobs = [JobRow("a" * 32, "me", "job", 60.0)]
        now = store.now()
        store.commit(cluster.version, [granted(cluster, keys[0], now)], now=now, once=once, jobs=jobs)
        store.reports.put("gpu-a", b"{}", b"{}", 60.0)
        store.jobs.write([JobRow("b" * 32, "you", "order", 60.0)])


def test_all_but_the_state_has_an_end(embedded_redis: RedisServer) -> None:
    url = embedded_redis.fresh_url()
    use(url, ["k"])
    with closing(RedisClient.from_url(url)) as client:
        RedisSessions(client).begin("t", "s")
        left_ms: dict[str, float] = {}
        for key in client.driver.scan_iter(f"{client.key('')}*"):
            words = key.decode().removeprefix(client.key("")).split(":")
            name = ":".join([*words[:2], *("…" for _ in words[2:])])
            left_ms[name] = min(client.driver.pttl(key), left_ms.get(name, 1e15))
    state = {"changes", "inventory", "kinds", "leases", "meta"}
    assert {name for name, ms in left_ms.items() if ms < 0} == state
    lives_s = {name: round(ms / 1000, -1) for name, ms in left_ms.items() if ms >= 0}
    assert lives_s == {
        "jobs:of:…": LIVE_S,
        "jobs:row:…": 60.0,
        f"once:{CALLER}": KEEP_S,
        f"once:{CALLER}:…": KEEP_S,
        "report:gpu-a": 60.0,
        "report-record:gpu-a": RECORD_TTL_S,
        "sessions:t": SESSION_LIFE_S,
    }


def test_redis_keeps_no_sizes_of_what_counts_for_no_caller(embedded_redis: RedisServer) -> None:
    """Nobody would count them, and drop those of what is gone: a year of results would stay."""
    client = RedisClient.from_url(embedded_redis.fresh_url())
    with closing(RedisStore(client)) as store:
        version, now = started(store).version, store.now()
        row = JobRow("a" * 32, None, "result", 60.0)
        store.commit(version, [Queued(Request("t", 1), 1.0, 1, 1.0)], now=now, jobs=[row])
        store.jobs.write([row._replace(name="b" * 32)])
        assert len(list(client.driver.scan_iter(client.key("jobs:row:*")))) == 2
        assert list(client.driver.scan_iter(client.key("jobs:of:*"))) == []


def test_what_a_waiter_was_told_goes_if_it_has_died(embedded_redis: RedisServer) -> None:
    client = RedisClient.from_url(embedded_redis.fresh_url())
    with closing(RedisStore(client)) as store:
        version = started(store).version
        store.commit(version, [Queued(Request("t", 1), 1.0, 1, 1.0)], now=store.now())
        client.driver.set(client.key("pending:waits:t"), 1)
        store.commit(version + 1, [Cancelled("t", 2.0)], now=store.now())
        assert 0 < client.driver.pttl(client.key("pending:woken:t")) <= 5000


def test_the_names_of_keys_that_are_gone_go_with_the_next_key(embedded_redis: RedisServer) -> None:
    url = embedded_redis.fresh_url()
    use(url, ["k"])
    with closing(RedisClient.from_url(url)) as client:
        names = client.key(f"once:{CALLER}")
        client.driver.zadd(names, {"gone": (time.time() - 2 * KEEP_S) * 1e6})
        use(url, ["l", "m"])
        assert client.driver.zcard(names) == 3


def test_a_machine_that_is_not_heard_of_for_a_day_is_forgotten(embedded_redis: RedisServer) -> None:
    with closing(RedisStore(RedisClient.from_url(embedded_redis.fresh_url()))) as store:
        now = store.now()
        store.reports.put_sighting("long gone", Sighting(now - 90_000))
        store.reports.put_sighting("was short", Sighting(0.0, reading=Reading(5.0, now - 5.0)))
        store.reports.put_sighting("this", Sighting(now))
        assert store.reports.sightings().keys() == {"was short", "this"}
