"""The views for people and BI say what the manager says, across snapshots, resets and another inventory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Change,
    GpuCleaned,
    Preempting,
    Released,
    Renewed,
    Resumed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.scheduling.accounting.lives import Lives
from resource_manager.storage import Store
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection
from resource_manager.storage.sql.store import SqlStore
from tests.builders import redefine
from tests.sql_servers import DATABASES, SqlServer
from tests.storage.walk import Walk, first_state, granted, started


@pytest.fixture(params=["sqlite", *DATABASES])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store that writes a snapshot every five changes, in a database without the states of other tests."""
    url = request.getfixturevalue(request.param).fresh_url()
    if request.param == "postgresql":
        name = f"views_{uuid.uuid4().hex}"
        request.getfixturevalue(request.param).psql(f"CREATE DATABASE {name}")
        url = url.replace("/postgres?", f"/{name}?")
    with closing(SqlStore(Database(url), snapshot_every=5)) as opened:
        yield opened


def test_postgresql_analyses_the_snapshot_after_each_change(postgresql: SqlServer) -> None:
    with closing(Database(postgresql.fresh_url())) as database:
        database.create()
        query = "SELECT reloptions FROM pg_class WHERE oid = '{snapshot}'::regclass"
        [row] = database.run(lambda connection: list(database.execute(connection, query)))
    assert set(row[0]) == {"autovacuum_analyze_threshold=0", "autovacuum_analyze_scale_factor=0"}


@pytest.fixture
def manager(store: Store) -> GPUResourceManager:
    return GPUResourceManager(store=store, inventory=default_inventory(3))


def rows(store: Store, view: str) -> list[dict[str, Any]]:
    assert isinstance(store, SqlStore)
    if store.database.dialect.title == "PostgreSQL":  # which does this within a minute
        store.database.run(lambda connection: store.database.execute(connection, "ANALYZE {snapshot}"))
    name = store.database.dialect.quoted(view)
    query = f"SELECT * FROM {name} WHERE namespace = :namespace"

    def work(connection: Connection) -> list[dict[str, Any]]:
        cursor = store.database.execute(connection, query)
        return [dict(zip([column[0] for column in cursor.description], row, strict=True)) for row in cursor]

    return store.database.run(work)


def servers(manager: GPUResourceManager) -> dict[str, tuple[int, int]]:
    return {
        row["server_name"]: (int(row["available_gpus"]), int(row["available_cpus"]))
        for row in rows(manager.store, "gpu_servers")
    }


def test_free_amounts_are_those_of_the_manager(manager: GPUResourceManager) -> None:
    for step in range(14):
        manager.allocate_resources(f"t{step}", 1 + step % 3, 4)
        if step % 3 == 2:
            manager.release_resources(f"t{step - 1}")
        summary = manager.get_resource_summary()["servers"]
        assert servers(manager) == {
            server["server_name"]: (server["available_gpus"], server["available_cpus"]) for server in summary
        }
    manager.drain(2)
    assert servers(manager)["gpu-server-2"] == (0, 0)
    manager.resume(2)
    assert servers(manager)["gpu-server-2"][0] > 0


def test_allocations_have_their_state_and_times(manager: GPUResourceManager) -> None:
    manager.allocate_resources("first", 2, 4, team="vision")
    manager.allocate_resources("second", 3, 4)
    manager.release("first", outcome="SUCCESS")
    manager.allocate_resources("third", 4, 4)
    found = {row["task_id"]: row for row in rows(manager.store, "task_allocations")}
    assert {name: row["status"] for name, row in found.items()} == {
        "first": "SUCCESS",
        "second": "RUNNING",
        "third": "RUNNING",
    }
    assert found["first"]["end_time"] >= found["first"]["start_time"]
    assert found["second"]["end_time"] is None
    assert found["first"]["team"] == "vision"
    assert loaded(found["second"]["allocated_gpus"]) == [2, 3, 4]
    assert (found["second"]["server_id"], int(found["second"]["allocated_cpus"])) == (0, 4)


@pytest.mark.parametrize(("seed", "snapshot_every"), [(1, 5), (2, 5), (3, 200), (4, 200)])
def test_views_follow_every_kind_of_change(store: SqlStore, seed: int, snapshot_every: int) -> None:
    """A random walk with gangs, preemption, agents and inventories, by the state that its changes lead to.

    Of what is over the views say what the walk over the history says.
    """
    store = SqlStore(store.database, snapshot_every=snapshot_every)
    cluster, walk = started(store), Walk(seed)
    lives = Lives(first_state())
    for step in range(60):
        now = store.now()
        changes = walk.changes(cluster, now)
        if changes:
            store.commit(cluster.version, changes, now=now)
            for change in changes:
                cluster.apply(change)
                lives.add(change)
            store.tidy_up(cluster)
        if step % 4 == 0:
            compare(store, cluster)
            assert ended_in_view(store) == ended_in(lives)
    assert ended_in(lives)


def ended_in(lives: Lives) -> dict[tuple[int, int], tuple[str, list[int]]]:
    return {
        (token, rank): (
            end.outcome or ("EXPIRED" if end.expired else "RELEASED"),
            list(member.gpu_ids),
        )
        for token, life in lives.lives.items()
        for end in life.ends
        for rank, member in end.ranked
    }


def ended_in_view(store: SqlStore) -> dict[tuple[int, int], tuple[str, list[int]]]:
    return {
        (row["fencing_token"], int(row["member_rank"])): (row["status"], loaded(row["allocated_gpus"]))
        for row in rows(store, "task_allocations")
        if row["end_time"] is not None
    }


def compare(store: SqlStore, cluster: ClusterState) -> None:
    held = [*cluster.leases.values(), *cluster.remainders.values()]
    expected = {
        (lease.fencing_token, rank): (
            "ERROR" if lease.quarantined else "PREEMPTING" if lease.preempted_by else "RUNNING",
            list(member.gpu_ids),
        )
        for lease in held
        for rank, member in lease.ranked
    }
    lives = {"RUNNING", "PREEMPTING", "ERROR"}
    found = rows(store, "task_allocations")
    assert {
        (row["fencing_token"], int(row["member_rank"])): (row["status"], loaded(row["allocated_gpus"]))
        for row in found
        if row["status"] in lives
    } == expected
    assert all((row["end_time"] is None) == (row["status"] in lives) for row in found)
    free = {row["server_name"]: row for row in rows(store, "gpu_servers")}
    for state in cluster.nodes:
        if state.retired and state.name not in free:
            continue  # it is there with the next snapshot
        row = free.pop(state.name)
        closed = "DRAINED" if state.drained else "SILENT" if state.silent else "ACTIVE"
        assert row["status"] == ("RETIRED" if state.retired else closed)
        cpus = sum(
            lease.request.resources["cpus"] for lease in state.leases.values() for _ in lease.on(state.name)
        )
        assert int(row["allocated_cpus"]) == cpus
        assert int(row["available_gpus"]) == (state.whole_free if state.is_open else 0), state.name
        assert int(row["available_cpus"]) == (64 - cpus if state.is_open else 0)
    assert not free


def loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def follow(store: SqlStore, cluster: ClusterState, *changes: Change) -> None:
    """Make these changes one by one; the views say after each what it led to."""
    for change in changes:
        store.commit(cluster.version, [change], now=store.now())
        cluster.apply(change)
        compare(store, cluster)


def test_the_end_of_a_preemption_is_that_of_the_last_one(store: SqlStore) -> None:
    """Of those before it one would have ended later; both were taken back."""
    cluster, now = started(store), store.now()
    follow(
        store,
        cluster,
        granted(cluster, "t", now),
        Preempting("t", 1, preemptor="u", until=now, at=now),
        Preempting("t", 1, preemptor="", until=now, at=now),
        Renewed("t", 1, at=now + 1, expires_at=now + 9),
        Preempting("t", 1, preemptor="u", until=now + 60, at=now),
        Preempting("t", 1, preemptor="", until=now + 60, at=now),
        Preempting("t", 1, preemptor="u", until=now, at=now),
        Renewed("t", 1, at=now + 1, expires_at=now + 9),
    )


def test_gpus_are_cleaned_where_an_agent_is_seen_until_a_silent_server_is_resumed(store: SqlStore) -> None:
    cluster, now = started(store), store.now()
    server = "gpu-server-0"
    lost, seen = AgentLost(server, now, since=now), AgentSeen(server, now)
    follow(store, cluster, seen, granted(cluster, "a", now))
    follow(store, cluster, Released("a", 1, now), AgentSeen("gpu-server-1", now), granted(cluster, "b", now))
    assert len(cluster.node(server).cleaning) == 2
    follow(store, cluster, *(GpuCleaned(server, gpu, 1, now) for gpu in (0, 1)), lost, seen)
    follow(store, cluster, lost, Resumed(server, now), Released("b", 2, now), granted(cluster, "c", now))
    assert not cluster.node(server).cleaning
    follow(store, cluster, seen, Released("c", 3, now), lost)


def test_a_reset_ends_what_ran_before(manager: GPUResourceManager) -> None:
    manager.allocate_resources("before", 2, 4)
    manager.reset_resources()
    manager.allocate_resources("after", 2, 4)
    found = {row["task_id"]: row["status"] for row in rows(manager.store, "task_allocations")}
    assert found == {"before": "RESET", "after": "RUNNING"}
    assert servers(manager)["gpu-server-0"] == (6, 60)


def test_another_inventory_is_seen_at_once(manager: GPUResourceManager) -> None:
    manager.allocate_resources("t", 2, 4)
    redefine(manager, nodes=default_inventory(5))
    assert len(servers(manager)) == 5
