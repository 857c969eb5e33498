"""Full memory of Redis: the cost of filling it, and leases that can still be renewed and released."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from resource_manager import GPUResourceManager, Settings
from resource_manager.core.changes import Cancelled, Change, Drained, Queued, Resumed
from resource_manager.core.models import Lease, Node, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import InvalidRequestError, KeysFullError, StoreFullError
from resource_manager.jobs.launchers import job_key
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.sessions import MAX_SESSIONS
from resource_manager.rest.tokens import Role
from resource_manager.storage import memory, open_store
from resource_manager.storage.once import Once
from resource_manager.storage.redis import store as redis_store
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.storage.redis.store import RedisStore
from tests.agent.reporting import gpu
from tests.agent.test_generation import JOB, PLACE, running_jobs
from tests.builders import granted_lease, present, queue_entry, redefine
from tests.eventually import wait_for
from tests.fleet.test_job_board import run
from tests.manager.commit.test_clock_jumps import HOUR_S, lose
from tests.redis_server import EMBEDDED, RedisServer, running_redis
from tests.storage.walk import granted, started

MIB = 2**20
BODY = {"required_gpus": 8, "required_cpus": 1}


@pytest.fixture(params=["embedded_redis", "system_redis"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Yield a Redis for this test only: of release 6.2, and of the release on PATH."""
    executable = EMBEDDED if request.param == "embedded_redis" else shutil.which("redis-server")
    with running_redis(executable, "--appendonly", "yes") as server:
        yield server


def fill(server: RedisServer) -> None:
    """Set the server's memory limit below its use."""
    with server.client() as admin:
        admin.config_set("maxmemory", 1)


def used(server: RedisServer) -> int:
    with server.client() as admin:
        return int(admin.info("memory")["used_memory"])


def all_keys(server: RedisServer) -> dict[bytes, Any]:
    with server.client() as admin:
        return {key: admin.dump(key) for key in admin.scan_iter()}


# ---- the store ----


def test_leases_and_the_queue_continue_with_full_memory(server: RedisServer) -> None:
    with GPUResourceManager.from_url(server.url, inventory=default_inventory()) as manager:
        held = [manager.allocate_resources(f"t{number}", 8, 1, ttl=600) for number in range(4)]
        assert all(held)
        for name in ("w1", "w2"):
            assert manager.submit(name, 8, 1)["state"] == "WAITING"
        fill(server)
        before = all_keys(server)
        for step in (
            lambda: manager.submit("new", 8, 1),
            lambda: manager.submit("w3", 2, 1, labels={"a": "b"}),
            lambda: redefine(manager, teams=Teams((Team("vision", 4),))),
            lambda: redefine(manager, nodes=[*default_inventory(), Node("one-more", 9)]),
        ):
            with pytest.raises(StoreFullError, match=r"memory is full.*raise maxmemory") as caught:
                step()
            assert "\n" not in str(caught.value)
        assert all_keys(server) == before, "nothing is written in part"
        for _ in range(300):
            renewed = manager.renew("t0")
        assert present(renewed["expires_at"]) > present(granted_lease(held[0])["expires_at"])
        assert manager.release_resources("t1"), "and the first pending request gets the free GPUs"
        assert manager.status_of("w1")["state"] == "RUNNING"  # type: ignore[index]
        assert manager.cancel("w2")
        assert manager.release_resources("t2")
        with pytest.raises(StoreFullError):
            manager.allocate_resources("new", 8, 1)
        manager.drain(3)
        manager.resume(3)
        with server.client() as admin:
            admin.config_set("maxmemory", 0)
        assert manager.allocate_resources("new", 8, 1) is not None
        assert {lease["task_id"] for lease in manager.leases()} == {"t0", "t3", "w1", "new"}


def test_a_lease_whose_request_waits_again_ends_with_full_memory(server: RedisServer) -> None:
    """It takes the place of the lease; refused, it would be tried again in front of every other change."""
    with GPUResourceManager.from_url(server.url, inventory=default_inventory()) as manager:
        held = [manager.allocate_resources(f"t{number}", 8, 1, ttl=600) for number in range(4)]
        manager.submit("urgent", 8, 1, priority=9, server=granted_lease(held[0])["server_name"])
        manager.preempt("t0", preemptor="urgent")
        fill(server)
        assert manager.release_resources("t3", outcome="NOT_STARTED")
        again = granted_lease(manager.status_of("t3"))
        assert again["fencing_token"] > granted_lease(held[3])["fencing_token"], "granted in the same commit"
        assert manager.release_resources("t0", outcome="PREEMPTED")
        assert granted_lease(manager.status_of("urgent"))
        assert queue_entry(manager.status_of("t0"))
        with pytest.raises(StoreFullError):
            manager.submit("new", 8, 1)


def test_with_full_memory_a_request_takes_the_place_of_a_lease_only(server: RedisServer) -> None:
    store = RedisStore(RedisClient.from_url(server.url))
    version, now = started(store).version, store.now()
    waits = Queued(Request("w", 8), now, 1, now)
    store.commit(version, [waits], now=now)
    fill(server)
    with pytest.raises(StoreFullError):
        store.commit(version + 1, [Cancelled("w", now), waits], now=store.now())


def test_a_jump_of_the_clock_pauses_grants_for_all_with_full_memory(server: RedisServer) -> None:
    with GPUResourceManager.from_url(server.url, inventory=default_inventory()) as manager:
        manager.allocate_resources("t", 8, 1)
        fill(server)
        lose(manager, HOUR_S)
        assert manager.expire_and_schedule() == []
    store = RedisStore(RedisClient.from_url(server.url))
    store.refresh(None)
    assert store.suspension.clock_jump_s == pytest.approx(HOUR_S, abs=1.0)


def test_stored_jobs_end_and_begin_with_full_memory(server: RedisServer) -> None:
    """What agents report and are told to do has a bound of its own; refused, GPUs would idle."""
    with closing(open_store(server.url)) as store:
        fleet = running_jobs(store)
        key = job_key("first", granted_lease(fleet.manager.submit("first", 2, job=JOB))["fencing_token"])
        assert fleet.manager.submit("second", 2, job=JOB, owner="ada")["state"] == "WAITING"
        fleet.report(gpu(0), gpu(1), **PLACE)
        fill(server)
        for state in ("running", "finished"):
            fleet.report(gpu(0), gpu(1), **PLACE, runs=[run(key, state)])
        fleet.report(gpu(0), gpu(1), **PLACE)
        assert present(fleet.manager.result_of("first"))["exit_code"] == 0
        wanted = fleet.receiver.board.jobs("gpu-a")["jobs"]
        assert [item["spec"]["environment"]["GPU_LEASE_ID"] for item in wanted] == ["second"]
        assert fleet.manager.order_job("gpu-a", wanted[0]["key"], {"want": "stop"})


def test_a_waiter_gets_its_lease_with_full_memory(server: RedisServer) -> None:
    with GPUResourceManager.from_url(server.url, inventory=default_inventory()) as manager:
        for number in range(4):
            manager.allocate_resources(f"t{number}", 8, 1)
        manager.submit("w", 8, 1)
        fill(server)
        lease = manager.store.await_decision("w", lambda: not manager.release_resources("t0"), 5.0)
        assert isinstance(lease, Lease)


def test_a_state_is_closed_for_a_move_with_full_memory(server: RedisServer) -> None:
    store = RedisStore(RedisClient.from_url(server.url))
    version = started(store).version
    fill(server)
    store.close_state(version, "it moved")
    store.refresh(None)
    assert store.closed == "it moved"


def test_a_browser_logs_in_and_out_with_full_memory(server: RedisServer) -> None:
    """Someone must be able to cancel what fills it."""
    sessions = persistence_of(Settings(store=server.url)).sessions
    fill(server)
    for number in range(2 * MAX_SESSIONS):
        sessions.begin("token", str(number))
        assert sessions.is_live("token", str(number))
    assert not sessions.is_live("token", "0")
    sessions.end("token", str(2 * MAX_SESSIONS - 1))
    assert not sessions.is_live("token", str(2 * MAX_SESSIONS - 1))


def test_a_lock_hand_off_and_a_restart_work_with_full_memory(server: RedisServer) -> None:
    """Even the lock writes, and so does the first read of a Redis after its restart."""
    with GPUResourceManager.from_url(
        server.url, inventory=default_inventory(), confirmation_window_s=0
    ) as manager:
        manager.allocate_resources("t", 8, 1)
        fill(server)
        lock = RedisLock(RedisClient.from_url(server.url))
        assert lock.acquire(5)
        waiter = threading.Thread(target=manager.renew, args=("t",))
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive(), "the renewal waits for the lock"
        lock.release()
        waiter.join(30)
        assert not waiter.is_alive()
        server.stop()
        server.start()
        with server.client() as admin:
            admin.config_set("maxmemory", 1)
        manager.renew("t")
        assert manager.release_resources("t")


def test_in_a_group_commit_only_operations_that_need_memory_are_refused(server: RedisServer) -> None:
    """Concurrent threads share one commit."""
    with GPUResourceManager.from_url(server.url, inventory=default_inventory()) as manager:
        for name in ("t0", "t1"):
            manager.allocate_resources(name, 8, 1)
        fill(server)
        ended: dict[str, object] = {}

        def note(name: str, step: Callable[[], object]) -> None:
            try:
                ended[name] = step()
            except StoreFullError as error:
                ended[name] = error

        steps: dict[str, Callable[[], object]] = {
            "allocate": lambda: manager.allocate_resources("a", 8, 1),
            "renew": lambda: manager.renew("t0"),
            "submit": lambda: manager.submit("b", 8, 1),
            "release": lambda: manager.release_resources("t1"),
        }
        threads = [threading.Thread(target=note, args=item) for item in steps.items()]
        with manager._commits._groups.mutex:  # until all are queued
            for thread in threads:
                thread.start()
            wait_for(lambda: len(manager._commits._groups._arrived) == len(threads))
        for thread in threads:
            thread.join()
        assert isinstance(ended["allocate"], StoreFullError)
        assert isinstance(ended["submit"], StoreFullError)
        assert ended["release"] is True
        assert [lease["task_id"] for lease in manager.leases()] == ["t0"]


def test_with_full_memory_a_change_displaces_the_oldest_of_the_history(server: RedisServer) -> None:
    """Fill a long history first: a short one is kept whole."""
    store = RedisStore(RedisClient.from_url(server.url))
    cluster = started(store)
    for full in (False, False, True, True):
        if full:
            fill(server)
        before = used(server)
        for _ in range(6):
            now = store.now()
            changes: list[Change] = [Drained("gpu-server-0", now), Resumed("gpu-server-0", now)] * 500
            store.commit(cluster.version, changes, now=now)
            for change in changes:
                cluster.apply(change)
        if full:
            assert used(server) < before + 128 * 1024
            assert len(store.history(limit=100_000)) == 12_000
        else:
            assert len(store.history(limit=100_000)) == cluster.version


def test_a_renewal_with_full_memory_is_in_the_history_and_seen_by_other_clients(server: RedisServer) -> None:
    """Keep its change in the history, or other clients would miss the renewal."""
    with (
        GPUResourceManager.from_url(server.url, inventory=default_inventory()) as mine,
        GPUResourceManager.from_url(server.url, inventory=default_inventory()) as other,
    ):
        mine.allocate_resources("t", 8, 1)
        assert other.status_of("t") is not None
        fill(server)
        renewed = mine.renew("t")
        seen = granted_lease(other.status_of("t"))
        assert seen is not None
        assert seen["expires_at"] == renewed["expires_at"]
        assert [change["change"] for change in other.history()] == ["granted", "renewed"]


@pytest.mark.parametrize("size", [100, 8000])
def test_the_history_is_bounded_in_bytes(server: RedisServer, size: int) -> None:
    store = RedisStore(RedisClient.from_url(server.url), history_bytes=4 * MIB)
    cluster = started(store)
    before = used(server)
    for step in range(12 * MIB // (size + 200) // 100):
        now = store.now()
        changes: list[Change] = []
        for number in range(50):
            changes.append(
                Queued(
                    Request(f"t{step}-{number}", 9, labels={"note": "x" * size}), now, 50 * step + number, now
                )
            )
            changes.append(Cancelled(f"t{step}-{number}", now, "y" * size))
        store.commit(cluster.version, changes, now=now)
        for change in changes:
            cluster.apply(change)
    wait_for(lambda: used(server) - before < 5 * MIB)  # without the buffer of the last commit
    assert used(server) - before > 2 * MIB
    kept = store.history(limit=100_000)
    assert kept[-1][0] == cluster.version
    assert [version for version, _ in kept] == list(range(kept[0][0], cluster.version + 1))
    with server.client() as admin:
        counted = int(admin.hget("{gpu_manager}:meta", "history_bytes"))
        assert counted <= 4 * MIB
    store.replace(cluster.snapshot())
    with server.client() as admin:
        assert int(admin.hget("{gpu_manager}:meta", "history_bytes")) == counted


def test_the_bytes_of_a_grant_count_to_the_history(server: RedisServer) -> None:
    store = RedisStore(RedisClient.from_url(server.url))
    cluster = started(store)
    change = granted(cluster, "t" * 1000, store.now())
    store.commit(cluster.version, [change], now=store.now())
    with server.client() as admin:
        assert int(admin.hget("{gpu_manager}:meta", "history_bytes")) > 1000


def test_the_bytes_of_the_history_are_a_setting(server: RedisServer) -> None:
    with GPUResourceManager.from_url(
        server.url, inventory=default_inventory(), history_bytes=9 * MIB
    ) as manager:
        assert manager.store.history_bytes == 9 * MIB  # type: ignore[attr-defined]
    assert Settings.load({"GPU_MANAGER_HISTORY_BYTES": str(8 * MIB)}).history_bytes == 8 * MIB


def test_the_lock_of_a_variable_store_works_with_full_memory(server: RedisServer) -> None:
    """Check the lock, and the high-water mark of the stored version."""
    client = RedisClient.from_url(server.url)
    fill(server)
    lock = RedisLock(client, "gpu_resource_lock:gpu_resource_status")
    assert lock.acquire(1)
    lock.release()
    client.put((client.key("witness"), 7, None))
    assert client.driver.get(client.key("witness")) == b"7"


# ---- a request as a whole ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", {f"label-{number}": "x" * 240 for number in range(50)}),
        ("labels", {f"ключ-{number}": "ы" * 200 for number in range(30)}),
        ("gpu_types", ["H100" + "x" * 200] * 50),
        ("resources", {f"amount-{number}" + "x" * 200: 1 for number in range(50)}),
    ],
)
def test_the_size_of_a_whole_request_is_limited(field: str, value: Any) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        for step in (manager.allocate_resources, manager.submit, manager.explain):
            with pytest.raises(
                InvalidRequestError,
                match=rf"^{field} is too large: [\d,]+ bytes, the whole request [\d,]+; "
                r"a request may take 8,192 as JSON$",
            ) as caught:
                step("t", 8, 1, **{field: value})
            assert caught.value.field == field
        with pytest.raises(InvalidRequestError, match="too large"):
            manager.try_allocate_batch([{"lease_id": "t", "gpus": 8, field: value}])
        assert (
            manager.allocate_resources("t", 8, 1, labels={f"l{n}": "x" * 240 for n in range(28)}) is not None
        )


# ---- answers to keys ----


@pytest.fixture
def service(server: RedisServer) -> Iterator[Callable[[str], Any]]:
    """Yield service("ada"): a client of a service on that Redis, with a token of ada."""
    with GPUResourceManager.from_url(server.url, inventory=default_inventory()) as manager:
        kept = persistence_of(Settings(store=server.url))
        made = standalone(manager, kept, rate="100000/second")
        app = create_app(made)

        def caller(name: str) -> Any:
            client = app.test_client()
            text = tokens.create(kept.tokens, name, Role.USER)
            client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
            return client

        yield caller
        made.watch.close()


def keyed(client: Any, key: str, body: Any, path: str = "/api/submit") -> Any:
    return client.post(path, json=body, headers={"Idempotency-Key": key})


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 900_000: 1},
        {**BODY, "task_id": "t", "vendor": "x" * 900_000},
        {**BODY, "task_id": "t", "labels": {f"{n}" + "x" * 240: "y" * 240 for n in range(50)}},
        {**BODY, "task_id": "t", **{f"k{n}" + "x" * 1000: 1 for n in range(500)}},
    ],
    ids=["key", "vendor", "labels", "keys"],
)
def test_a_refusal_neither_repeats_the_request_nor_fills_redis(
    server: RedisServer, service: Callable[[str], Any], body: Any
) -> None:
    ada = service("ada")
    keyed(ada, "first", body)  # loads scripts and fills buffers
    before = used(server)
    for number in range(20):
        answer = keyed(ada, f"k{number}", body)
        assert answer.status_code == 400
        assert len(answer.data) < 10_000
    assert used(server) - before < 200_000
    with server.client() as admin:
        assert not list(admin.scan_iter("*:once:*")), "what changed nothing is not kept"


@pytest.mark.parametrize("place", ["memory", "redis"])
def test_a_caller_with_all_its_keys_gets_no_other_and_loses_none(
    server: RedisServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory, redis_store):
        monkeypatch.setattr(module, "MAX_KEYS", 50)
    store = open_store("memory://" if place == "memory" else server.url)
    with GPUResourceManager(store=store) as manager:
        manager.drain(0, once=Once("bob", "k", "f"))
        for number in range(50):
            manager.drain(0, once=Once("ada", f"k{number}", "f"))
        with pytest.raises(KeysFullError, match="50 idempotency keys of yours are kept"):
            manager.drain(0, once=Once("ada", "k50", "f"))
        manager.resume(0, once=Once("bob", "another", "f"))
        assert all(store.recall(Once("ada", f"k{number}", "f")) for number in range(50))


def test_keys_are_kept_and_changes_made_with_full_memory(
    server: RedisServer, service: Callable[[str], Any]
) -> None:
    ada, bob = service("ada"), service("bob")
    keyed(ada, "a", {**BODY, "task_id": "t"})
    for n in range(4):
        keyed(bob, f"b{n}", {**BODY, "task_id": f"w{n}"})
    fill(server)
    answer = keyed(bob, "s", {**BODY, "task_id": "new"})
    assert answer.status_code == 503
    assert answer.json["type"] == "urn:gpu-manager:store-full"
    assert answer.json["error"] == "Resource allocation failed"
    assert answer.headers["Retry-After"]
    assert "memory is full" in answer.json["detail"]
    for key in ("r1", "r2"):
        assert keyed(ada, key, {"task_id": "t"}, "/api/renew").status_code == 200
    for _ in range(2):
        assert keyed(bob, "c", {"task_id": "w3"}, "/api/cancel").status_code == 200
        assert keyed(ada, "e", {"task_id": "t"}, "/api/release").status_code == 200
    assert bob.post("/api/cancel", json={"task_id": "w3"}).status_code == 404
    assert persistence_of(Settings(store=server.url)).secret, "a service can start"


# ---- the whole attack ----


def test_a_flood_by_one_token_does_not_stop_renewals_by_others(server: RedisServer, tmp_path: Path) -> None:
    """Send the real service requests of the largest size, each with a key, until Redis is full."""
    kept = persistence_of(Settings(store=server.url)).tokens
    headers = {
        name: {"Authorization": f"Bearer {tokens.create(kept, name, role)}"}
        for name, role in (("ada", Role.USER), ("eve", Role.USER), ("root", Role.OPERATOR))
    }
    command = [sys.executable, "-m", "resource_manager.cli", "--store", server.url, "serve", "--example"]
    command += ["--port", "0"]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next(json.loads(line)["address"] for line in process.stderr if "serving at" in line)
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        http = httpx.Client(base_url=address, timeout=60)
        mine = [
            http.post("/api/allocate", json={**BODY, "task_id": f"ada-{n}"}, headers=headers["ada"]).json()
            for n in range(3)
        ]
        for n in range(3):
            http.post("/api/submit", json={**BODY, "task_id": f"ada-w{n}"}, headers=headers["ada"])
        with server.client() as admin:
            admin.config_set("maxmemory", used(server) + 3 * MIB)
        labels = {f"label-{number}": "x" * 240 for number in range(28)}
        refused = 0
        for number in range(3000):
            body = {**BODY, "task_id": f"eve-{number}", "labels": labels}
            key = {"Idempotency-Key": f"eve-{number}"}
            answer = http.post("/api/submit", json=body, headers={**headers["eve"], **key})
            refused = refused + 1 if answer.status_code == 503 else 0
            assert answer.status_code in (200, 503), answer.text
            if refused == 20:
                break
        assert refused == 20, "the memory is full"
        assert answer.json()["type"] == "urn:gpu-manager:store-full"
        for lease in mine:
            body = {"task_id": lease["task_id"], "fencing_token": lease["fencing_token"]}
            for more in ({}, {"Idempotency-Key": f"renew-{lease['task_id']}"}):
                renewed = http.post("/api/renew", json=body, headers={**headers["ada"], **more})
                assert renewed.status_code == 200, renewed.text
        assert http.post("/api/release", json=body, headers=headers["ada"]).status_code == 200
        cancel = {"task_id": "ada-w2"}
        assert http.post("/api/cancel", json=cancel, headers=headers["ada"]).status_code == 200
        waits = http.get("/api/queue?limit=1000", headers=headers["root"]).json()["items"]
        flood = [entry["task_id"] for entry in waits if entry["task_id"].startswith("eve-")]
        assert len(flood) > 50
        for task_id in flood:
            done = http.post("/api/cancel", json={"task_id": task_id}, headers=headers["root"])
            assert done.status_code == 200, done.text
        with server.client() as admin:
            admin.config_set("maxmemory", 0)
        after = http.post("/api/submit", json={**BODY, "task_id": "ada-new"}, headers=headers["ada"])
        assert after.status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        http.close()
        drain.join()
        process.stderr.close()
