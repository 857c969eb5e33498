"""The Redis store and lock under faults of Redis, the network and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.changes import (
    Change,
    Drained,
    Granted,
    InventoryChanged,
    MembersReleased,
    Preempting,
    Quarantined,
    Released,
    Renewed,
)
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.errors import (
    CorruptStateError,
    NewerFormatError,
    StaleStateError,
    StateLostError,
    StateReplacedError,
    StateUnconfirmedError,
    StoreUnavailableError,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import Renewal
from resource_manager.scheduling import lease_steps
from resource_manager.settings import Settings
from resource_manager.storage import open_store
from resource_manager.storage.backup import read_backup, restore, write_backup
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.store import RedisStore
from tests.builders import queue_entry
from tests.faults.proxy import Proxy
from tests.redis_server import RedisServer
from tests.storage.dumps import dump_of_redis
from tests.storage.walk import add, first_state, granted, servers, started

TRUSTING = ClusterSettings(confirmation_window_s=0)


def opened(url: str) -> RedisStore:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    return store


def leases(store: RedisStore) -> set[str]:
    cluster = store.refresh(None)
    assert cluster is not None
    return set(cluster.leases)


@pytest.fixture
def url(embedded_redis: RedisServer) -> str:
    return embedded_redis.fresh_url()


@pytest.fixture
def proxy(embedded_redis: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(str(embedded_redis.socket))
    yield proxy
    proxy.close()


# ---- outages ----


def test_an_unreachable_redis_is_reported_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as caught:
        GPUResourceManager.from_url("redis://localhost:1/0").leases()
    assert time.monotonic() - begin < 5
    assert "\n" not in str(caught.value)


def test_a_wrong_password_is_reported_as_a_login_error(own_redis: RedisServer) -> None:
    own_redis.client().config_set("requirepass", "right")
    with pytest.raises(StoreUnavailableError, match="it refused the login"):
        opened(f"unix://:wrong@{own_redis.socket}").refresh(None)


def test_a_store_recovers_from_an_outage(own_redis: RedisServer) -> None:
    store = opened(own_redis.url)
    cluster = started(store, TRUSTING)
    add(store, cluster, "a")
    own_redis.stop(signal.SIGKILL)
    for step in (
        lambda: add(store, cluster, "b"),
        lambda: store.refresh(cluster),
        lambda: store.lock().acquire(1),
        lambda: store.history(),
    ):
        with pytest.raises(StoreUnavailableError):
            step()
    own_redis.start()
    after = store.refresh(cluster)
    assert after is not None
    assert set(after.leases) == {"a"}
    add(store, after, "b")
    assert leases(store) == {"a", "b"}


@pytest.mark.thorough
def test_after_a_restart_grants_pause_for_the_recovery_window(own_redis: RedisServer) -> None:
    store = opened(own_redis.url)
    cluster = started(store, ClusterSettings(confirmation_window_s=3.0))
    add(store, cluster, "a")
    fencing, version = cluster.last_fencing_token, cluster.version
    own_redis.stop()
    own_redis.start()
    with pytest.raises(StaleStateError):
        add(store, cluster, "b")
    after = store.refresh(cluster)
    assert after is not None
    assert after.version > version + 1000, "no earlier replica passes as current"
    assert after.last_fencing_token > fencing + 1000, "no fencing token of a lost lease is issued again"
    assert after.sequence > 1000, "nor its short id"
    said = r"^the store restarted or was restored \d s ago; grants resume in [0123] s \(until then the owners"
    with pytest.raises(StateUnconfirmedError, match=said) as caught:
        add(store, after, "b")
    assert 0 < caught.value.remaining_s <= 3.0
    released = Released("a", after.leases["a"].fencing_token, store.now())
    store.commit(after.version, [released], now=store.now())
    after.apply(released)
    time.sleep(caught.value.remaining_s + 0.1)
    add(store, after, "b")
    assert leases(store) == {"b"}


@pytest.mark.thorough
def test_a_manager_renews_and_releases_during_the_recovery_window(own_redis: RedisServer) -> None:
    with GPUResourceManager.from_url(
        own_redis.url, inventory=default_inventory(), confirmation_window_s=3.0
    ) as manager:
        held = manager.allocate_resources("a", 8, 8)
        assert held is not None
        own_redis.stop()
        own_redis.start()
        assert manager.renew("a", fencing_token=held["fencing_token"])["state"] == "RUNNING"
        assert manager.allocate_resources("b", 2, 2) is None
        waits = queue_entry(manager.submit("c", 2, 2))
        assert (waits["state"], waits["kind"]) == ("WAITING", "recovering")
        with GPUResourceManager.from_url(
            own_redis.url, confirmation_window_s=3.0
        ) as other:  # has not granted
            (entry,) = other.queue()
            assert re.match(
                r"the store restarted or was restored \d s ago; grants resume in \d s",
                entry["reason"],
            )
        assert manager.release_resources("a")
        time.sleep(3.1)
        manager.expire_and_schedule()
        assert [lease["task_id"] for lease in manager.leases()] == ["c"]


def test_a_restart_without_data_is_a_lost_state(own_redis_of_each_release: RedisServer) -> None:
    server = own_redis_of_each_release
    store = opened(server.url)
    cluster = started(store)
    add(store, cluster, "a")
    server.stop(signal.SIGKILL)
    server.start()
    for step in (lambda: store.refresh(cluster), lambda: add(store, cluster, "b")):
        with pytest.raises(StateLostError, match=r"\(version 1; now: empty\)"):
            step()
    newcomer = opened(server.url)
    assert newcomer.initialise(first_state()), "a new client cannot detect the loss"
    with pytest.raises(StateReplacedError, match=r"now: another state\); .* start this process again"):
        store.refresh(cluster)
    with pytest.raises(StateReplacedError):
        add(store, cluster, "b")
    opened(server.url).replace(first_state())
    for client in (store, newcomer, opened(server.url)):
        after = client.refresh(None)
        assert after is not None
        assert after.last_fencing_token > 10**12
        assert after.version > 10**12
        add(client, after, f"task-{id(client)}")


def test_remains_of_a_lost_state_do_not_affect_the_next(url: str, embedded_redis: RedisServer) -> None:
    store = opened(url)
    cluster = started(store)
    for task_id in "abc":
        add(store, cluster, task_id)
    embedded_redis.client().delete(RedisClient.from_url(url).key("meta"))
    newcomer = opened(url)
    fresh = started(newcomer)
    assert not fresh.leases
    assert newcomer.history() == []
    add(newcomer, fresh, "d")
    assert [version for version, _ in newcomer.history()] == [1]


def test_a_state_without_its_leases_is_a_lost_one(url: str, embedded_redis: RedisServer) -> None:
    """A new process granted GPUs whose jobs ran, and nobody was told."""
    store = opened(url)
    cluster = started(store)
    add(store, cluster, "a")
    store.commit(cluster.version, lease_steps.renew(cluster, "a", store.now()), now=store.now())
    embedded_redis.client().delete(RedisClient.from_url(url).key("leases"))
    with pytest.raises(StateLostError, match=r"has lost leases of its state \(version 2\); restore its data"):
        opened(url).refresh(None)
    store.replace(first_state())
    after = opened(url).refresh(None)
    assert after is not None
    add(store, after, "b")


def test_an_older_copy_of_the_data_is_a_lost_state(url: str, embedded_redis: RedisServer) -> None:
    store = opened(url)
    cluster = started(store)
    add(store, cluster, "a")
    meta = RedisClient.from_url(url).key("meta")
    embedded_redis.client().hset(meta, "version", 0)
    with pytest.raises(StateLostError, match=r"^Redis at .* \(version 1; now: 0\); .*over with a reset$"):
        store.refresh(cluster)
    with pytest.raises(StaleStateError):
        add(store, cluster, "b")


def test_a_version_that_no_commit_led_to_is_not_that_of_another_state(
    url: str, embedded_redis: RedisServer
) -> None:
    """A restart let the state jump to the version of a replica; one of a dump from before jumps, too."""

    def restart() -> None:
        embedded_redis.client().hset(RedisClient.from_url(url).key("meta"), "server", "another")

    store, other = opened(url), opened(url)
    cluster = started(store, TRUSTING)
    add(store, cluster, "a")
    bring_back = dump_of_redis(url)
    add(store, cluster, "lost")
    restart()
    replica = store.refresh(None)
    assert replica is not None
    bring_back()
    restart()
    theirs = other.refresh(None)
    assert theirs is not None
    assert theirs.version == replica.version - 1
    add(other, theirs, "b")
    add(other, theirs, "c")
    with pytest.raises(StateLostError):
        store.refresh(replica)
    assert set(replica.leases) == {"a", "lost"}


def test_a_full_memory_refuses_grants_and_accepts_releases(own_redis: RedisServer) -> None:
    store = opened(own_redis.url)
    cluster = started(store)
    add(store, cluster, "a")
    own_redis.client().config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailableError, match="memory is full"):
        add(store, cluster, "b")
    assert leases(store) == {"a"}
    released = Released("a", cluster.leases["a"].fencing_token, store.now())
    store.commit(cluster.version, [released], now=store.now())
    cluster.apply(released)
    own_redis.client().config_set("maxmemory", "0")
    add(store, cluster, "b")
    assert leases(store) == {"b"}


def test_a_read_only_replica_is_reported_as_one(own_redis: RedisServer) -> None:
    started(opened(own_redis.url))
    own_redis.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    store = opened(own_redis.url)
    cluster = store.refresh(None)
    assert cluster is not None
    with pytest.raises(StoreUnavailableError, match="read-only"):
        add(store, cluster, "a")


# ---- stored data ----


def test_keys_of_another_program_are_a_corrupt_state(url: str, embedded_redis: RedisServer) -> None:
    embedded_redis.client().set(RedisClient.from_url(url).key("meta"), "mine")
    store = opened(url)
    for step in (lambda: store.refresh(None), lambda: store.initialise(first_state())):
        with pytest.raises(CorruptStateError, match="another program"):
            step()


@pytest.mark.parametrize("part", ["leases", "pending", "drained", "inventory"])
def test_a_corrupt_part_is_reported_and_left_unchanged(
    url: str, embedded_redis: RedisServer, part: str
) -> None:
    store = opened(url)
    started(store)
    key = RedisClient.from_url(url).key(part)
    if part == "inventory":
        embedded_redis.client().set(key, "{")
    else:
        embedded_redis.client().hset(key, "a", "{")
    with pytest.raises(CorruptStateError, match=r"Redis at unix://.*reset") as caught:
        opened(url).refresh(None)
    assert "\n" not in str(caught.value)
    store.replace(first_state())
    assert leases(store) == set()


def test_a_backup_takes_the_place_of_an_unreadable_state_only_by_force(
    url: str, embedded_redis: RedisServer, tmp_path: Path
) -> None:
    store = opened(url)
    add(store, started(store), "a")
    write_backup(store, tmp_path / "state.json")
    embedded_redis.client().set(RedisClient.from_url(url).key("inventory"), "{")
    backup, other = read_backup(tmp_path / "state.json"), opened(url)
    with pytest.raises(CorruptStateError, match="restore its data"):
        restore(other, backup)
    restore(other, backup, force=True)
    assert leases(other) == {"a"}


def test_a_newer_format_is_refused(url: str, embedded_redis: RedisServer) -> None:
    store = opened(url)
    cluster = started(store)
    embedded_redis.client().hset(RedisClient.from_url(url).key("meta"), "format", 2)
    for step in (
        lambda: opened(url).refresh(None),
        lambda: add(store, cluster, "a"),
        lambda: store.replace(first_state()),
    ):
        with pytest.raises(NewerFormatError, match=r"format 2.*upgrade"):
            step()


def test_a_change_of_a_newer_version_grants_nothing(url: str, embedded_redis: RedisServer) -> None:
    store, redis = opened(url), embedded_redis.client()
    cluster = started(store)
    manager = GPUResourceManager(Settings(store="memory://"), store=store)
    keys = RedisClient.from_url(url)
    text = '{"change":"teleported","lease_id":"t","at":1.0}'
    redis.xadd(keys.key("changes"), {"c": text, "i": "x"}, id=f"{cluster.version + 1}-0")
    redis.hincrby(keys.key("meta"), "version", 1)
    for step in (
        lambda: opened(url).refresh(cluster),
        lambda: add(store, cluster, "a"),
        lambda: manager.allocate("b", 2),
    ):
        with pytest.raises(NewerFormatError, match=r"Redis at unix://.*'teleported': upgrade"):
            step()
    assert redis.hlen(keys.key("leases")) == 0


@pytest.mark.parametrize(("caller", "by"), [("", "airflow:etl"), ("ada", "ada")])
def test_renewals_on_a_state_of_a_newer_version_say_who_asked(
    caller: str, by: str, url: str, embedded_redis: RedisServer
) -> None:
    store, redis, keys = opened(url), embedded_redis.client(), RedisClient.from_url(url)
    add(store, started(store), "a")
    manager = GPUResourceManager(Settings(store="memory://"), store=store)
    [lease] = manager.leases()
    text = '{"change":"teleported","lease_id":"t","at":1.0}'
    redis.xadd(keys.key("changes"), {"c": text, "i": "x"}, id=f"{manager.history()[-1]['version'] + 1}-0")
    redis.hincrby(keys.key("meta"), "version", 1)
    with asked_by(caller):
        renewal: Renewal = {"task_id": "a", "fencing_token": lease["fencing_token"], "by": "airflow:etl"}
        assert manager.renew_all([renewal]) == [True]
    last: Any = redis.xrevrange(keys.key("changes"), count=1)
    assert json.loads(last[0][1][b"c"])["by"] == by


def test_a_newcomer_refuses_a_state_that_changes_of_a_newer_version_led_to(
    url: str, embedded_redis: RedisServer
) -> None:
    """It reads the parts it knows, not the changes: what the newer version wrote beside them is unseen."""
    store, redis, kinds = opened(url), embedded_redis.client(), RedisClient.from_url(url).key("kinds")
    add(store, started(store), "a")
    assert redis.smembers(kinds) == {b"granted"}
    redis.sadd(kinds, "teleported")
    with pytest.raises(NewerFormatError, match=r"Redis at unix://.*'teleported': upgrade"):
        GPUResourceManager(Settings(store="memory://"), store=opened(url)).allocate("b", 2)
    newcomer = opened(url)
    newcomer.replace(first_state())
    assert leases(newcomer) == set()


# ---- scripts, stream, answers ----


def test_flushed_scripts_are_loaded_again(url: str, embedded_redis: RedisServer) -> None:
    store, redis = opened(url), embedded_redis.client()
    cluster = started(store)
    for task_id in "abc":
        redis.script_flush()
        add(store, cluster, task_id)
        redis.script_flush()
        assert store.refresh(cluster) is cluster


def test_an_ended_lease_leaves_no_field_behind(url: str, embedded_redis: RedisServer) -> None:
    """However it was renewed, preempted, quarantined and ended: else Redis would grow with each lease."""
    store, redis = opened(url), embedded_redis.client()
    cluster = started(store)
    keys = RedisClient.from_url(url).key("")

    def fields() -> set[tuple[bytes, bytes]]:
        hashes = [key for key in redis.scan_iter(f"{keys}*") if redis.type(key) == b"hash"]
        kept = b"attained:"  # what jobs computed: of the last ones, and bounded
        names = ((key, os.fsencode(field)) for key in hashes for field in redis.hkeys(key))
        return {(key, field) for key, field in names if not field.startswith(kept)}

    before: set[tuple[bytes, bytes]] | None = None
    for number, ranks in enumerate(((0, 1), (0,), (0, 1))):
        name, token = f"gang{number}", cluster.last_fencing_token + 1
        members = (Placement("gpu-server-0", (2,), port=29500), Placement("gpu-server-1", (0,)))
        lease = Lease(Request(name, 1, nodes=2), members, token, 1.0, 1e12)
        steps: list[Change] = [
            Granted(lease, 1.0),
            Renewed(name, token, 2.0, 1e12),
            Preempting(name, token, "stronger", 1e12, 3.0),
            Quarantined(name, token, 4.0),
            MembersReleased(name, token, ranks, 5.0) if len(ranks) == 1 else Released(name, token, 5.0),
        ]
        if len(ranks) == 1:
            steps.append(MembersReleased(name, token, (1,), 6.0))
        for step in steps:
            store.commit(cluster.version, [step], now=store.now())
            cluster.apply(step)
            store.tidy_up(cluster)
        after = fields()
        assert sorted(after - (before or after)) == []
        before = after


def test_an_inventory_is_written_once_and_read_once(url: str, embedded_redis: RedisServer) -> None:
    """The inventory is the largest part of the state, and rarely changes."""
    store = opened(url)
    cluster = started(store)
    meta = RedisClient.from_url(url).key("meta")

    def written_at() -> int:
        return int(embedded_redis.client().hget(meta, "inventory_version") or b"")

    first = written_at()
    add(store, cluster, "a")
    now = store.now()
    for change in (Drained("gpu-server-0", now), Released("a", cluster.last_fencing_token, now)):
        store.commit(cluster.version, [change], now=now)
        cluster.apply(change)
    assert written_at() == first
    nodes = cluster.snapshot().nodes
    changes = [InventoryChanged(nodes[:3], now), InventoryChanged(nodes[:2], now)]
    store.commit(cluster.version, changes, now=now)
    assert written_at() == cluster.version + 2
    again = store.refresh(None)
    assert again is not None
    assert again.snapshot().nodes == nodes[:2]


def test_a_whole_state_has_the_inventory_that_was_read_with_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever another thread reads meanwhile: its own replica, after another process changed the servers."""
    client = RedisClient.from_url(url)
    store, other = RedisStore(client), opened(url)
    theirs = started(other)
    store.refresh(None)
    run, calls = client.run, []

    def interrupted(*args: Any) -> Any:
        """Return an answer that another thread's question, and what it was about, overtakes."""
        answer = run(*args)
        calls.append(answer)
        if len(calls) == 1:
            other.commit(0, [InventoryChanged(servers(5), 1.0)], now=other.now())
            newer = store.refresh(None)
            assert newer is not None
            assert (newer.version, len(newer.nodes)) == (1, 5)
        return answer

    monkeypatch.setattr(client, "run", interrupted)
    older = store.refresh(None)
    assert older is not None
    assert (older.version, len(older.nodes)) == (0, len(theirs.nodes))
    newer = store.refresh(None)
    assert newer is not None
    assert (newer.version, len(newer.nodes)) == (1, 5)


def test_a_replica_reads_only_missed_changes(url: str) -> None:
    writer, reader = opened(url), opened(url)
    mine, theirs = started(writer), reader.refresh(None)
    for task_ids in ("a", "bc"):
        for task_id in task_ids:
            add(writer, mine, task_id)
        assert reader.refresh(theirs) is theirs
        assert theirs is not None
        assert theirs.snapshot() == mine.snapshot()


def test_a_trimmed_stream_leads_to_a_read_of_the_whole_state(url: str, embedded_redis: RedisServer) -> None:
    writer, reader = opened(url), opened(url)
    mine, theirs = started(writer), reader.refresh(None)
    assert theirs is not None
    for task_id in "abc":
        add(writer, mine, task_id)
    embedded_redis.client().xtrim(RedisClient.from_url(url).key("changes"), maxlen=1, approximate=False)
    caught_up = reader.refresh(theirs)
    assert caught_up is not theirs
    assert caught_up is not None
    assert caught_up.snapshot() == mine.snapshot()
    with pytest.raises(StaleStateError) as stale:
        add(reader, theirs, "d")
    assert stale.value.missed == (), "an incomplete list would be worse than none"
    assert [version for version, _ in reader.history()] == [3]


def test_the_stream_is_trimmed_to_about_its_length(url: str, embedded_redis: RedisServer) -> None:
    store = RedisStore(RedisClient.from_url(url), history_length=200)
    cluster = started(store)
    for i in range(200):
        add(store, cluster, f"t{i}")
        now = store.now()
        ended = Released(f"t{i}", cluster.last_fencing_token, now)
        store.commit(cluster.version, [ended], now=now)
        cluster.apply(ended)
    length = embedded_redis.client().xlen(RedisClient.from_url(url).key("changes"))
    assert 200 <= length <= 300


def test_a_lowered_limit_is_reached_by_a_thousand_a_commit(url: str, embedded_redis: RedisServer) -> None:
    """Redis serves nobody while the script runs."""
    before = RedisStore(RedisClient.from_url(url))
    cluster = started(before)
    add(before, cluster, "t")
    held = [Renewed("t", cluster.last_fencing_token, 1e12, before.now())] * 3000
    before.commit(cluster.version, held, now=before.now())
    store = RedisStore(RedisClient.from_url(url), history_length=200)
    replica = store.refresh(None)
    assert replica is not None
    lengths = []
    for task_id in "abcd":
        add(store, replica, task_id)
        lengths.append(embedded_redis.client().xlen(RedisClient.from_url(url).key("changes")))
    assert lengths[:2] == [2001, 1001]
    assert 200 <= lengths[2] <= 300
    assert lengths[3] == lengths[2] + 1


@pytest.mark.parametrize("lost", [1, 2])
def test_a_commit_with_a_lost_answer_is_made_once(proxy: Proxy, url: str, lost: int) -> None:
    namespace = url.partition("namespace=")[2]
    store = opened(proxy.url(namespace))
    cluster = started(store)
    proxy.lose_answers = lost
    add(store, cluster, "a")  # the driver sends it again; the script recognises its id
    assert proxy.lose_answers == 0
    add(store, cluster, "b")
    assert [version for version, _ in store.history()] == [1, 2]
    assert leases(opened(url)) == {"a", "b"}


def test_a_first_state_with_a_lost_answer_is_recognised(
    proxy: Proxy, url: str, embedded_redis: RedisServer
) -> None:
    store = opened(proxy.url(url.partition("namespace=")[2]))
    store.refresh(None)
    embedded_redis.client().script_load(store._write.text)  # so that the lost answer is that of the state
    proxy.lose_answers = 1
    assert store.initialise(first_state()), "it is sent again and recognised"
    assert proxy.lose_answers == 0
    assert not opened(url).initialise(first_state())


@pytest.mark.parametrize("lost", [1, 2])
def test_a_restore_with_a_lost_answer_is_made_once(
    proxy: Proxy, url: str, embedded_redis: RedisServer, lost: int
) -> None:
    store = opened(proxy.url(url.partition("namespace=")[2]))
    before = started(store)
    backup = replace(before.snapshot(), version=before.version + 100)
    embedded_redis.client().script_load(store._write.text)
    name = new_incarnation(store.now(), store.incarnation)
    proxy.lose_answers = lost
    store.restore(backup, before.version, incarnation=name, suspended_until=0.0, history_until=0)
    assert proxy.lose_answers == 0
    assert store.incarnation == name


def test_the_next_read_tells_an_unknown_outcome(proxy: Proxy, url: str) -> None:
    namespace = url.partition("namespace=")[2]
    store = opened(proxy.url(namespace))
    cluster = started(store)
    proxy.lose_answers = 100
    with pytest.raises(StoreUnavailableError):
        add(store, cluster, "a")
    proxy.lose_answers = 0
    assert store.refresh(cluster) is cluster
    assert set(cluster.leases) == {"a"}


def test_a_repeated_request_after_an_unknown_outcome_returns_the_same_lease(proxy: Proxy, url: str) -> None:
    namespace = url.partition("namespace=")[2]
    with GPUResourceManager.from_url(proxy.url(namespace), inventory=default_inventory()) as manager:
        proxy.lose_answers = 100
        with pytest.raises(StoreUnavailableError):
            manager.allocate_resources("a", 2, 2)
        proxy.lose_answers = 0
        granted = manager.allocate_resources("a", 2, 2)
        assert granted is not None
        [grant] = manager.history()
        assert grant["lease"]["fencing_token"] == granted["fencing_token"]
        assert len(manager.leases()) == 1


def test_a_slow_network_is_not_an_error(proxy: Proxy, url: str) -> None:
    store = opened(proxy.url(url.partition("namespace=")[2]))
    cluster = started(store)
    proxy.delay_s = 0.2
    add(store, cluster, "a")
    assert leases(store) == {"a"}


# ---- clocks ----


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_decision_by_a_clock_that_jumped_is_refused(url: str, jump_s: float) -> None:
    store = opened(url)
    cluster = started(store)
    store.clock._offset_s += jump_s  # as after a suspend, or with a wrong clock
    with pytest.raises(StaleStateError, match="clock") as caught:
        add(store, cluster, "a")
    assert caught.value.actual == cluster.version
    add(store, cluster, "a")  # the refusal corrected the clock
    assert abs(cluster.leases["a"].granted_at - opened(url).now()) < 1


def test_the_wall_clock_of_the_machine_is_not_used(url: str, set_wall_clock: Any) -> None:
    set_wall_clock(lambda _: 0.0)
    store = opened(url)
    cluster = started(store)
    add(store, cluster, "a")
    assert cluster.leases["a"].granted_at > 1.7e9


# ---- paused and forked processes ----


PAUSED_HOLDER = """
import os, signal, sys
from resource_manager.errors import LockError, StaleStateError
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.core.changes import Granted
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage import open_store
url = sys.argv[1]
store = open_store(url)
lock = RedisLock(RedisClient.from_url(url), life_s=0.5)
assert lock.acquire(1)
cluster = store.refresh(None)
os.kill(os.getpid(), signal.SIGSTOP)  # the pause: it continues after its lock expired
now = store.now()
token = cluster.last_fencing_token + 1
lease = Lease(Request("paused", 2), (Placement("gpu-server-0", (0, 1)),), token, now, now + 60)
try:
    store.commit(cluster.version, [Granted(lease, now)], now=now, lock=lock)
except StaleStateError:
    print("stale")
try:
    lock.release()
except LockError:
    print("lost")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("another_holds_the_lock", [True, False])
def test_a_holder_paused_past_its_lock_commits_nothing(url: str, another_holds_the_lock: bool) -> None:
    store = opened(url)
    started(store)
    paused = subprocess.Popen([sys.executable, "-c", PAUSED_HOLDER, url], stdout=subprocess.PIPE, text=True)
    os.waitid(os.P_PID, paused.pid, os.WSTOPPED)
    lock = store.lock()
    assert lock.acquire(5), "the paused holder's lock expired"
    cluster = store.refresh(None)
    assert cluster is not None
    now = store.now()
    change = granted(cluster, "awake", now)
    store.commit(cluster.version, [change], now=now, lock=lock)
    lock.release()  # which the commit has done
    assert not another_holds_the_lock or lock.acquire(5)
    paused.send_signal(signal.SIGCONT)
    output, _ = paused.communicate(timeout=10)
    assert output.split() == ["stale", "lost"]
    assert leases(store) == {"awake"}
