"""The views for people and BI say what the manager says, across snapshots, resets and another inventory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resource_manager.manager.inventory_file import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.sql import store as sql_store
from resource_manager.storage.sql.store import SqlStore


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GPUResourceManager]:
    """A manager whose store writes a snapshot every five changes."""
    monkeypatch.setattr(sql_store, "SNAPSHOT_EVERY", 5)
    file = f"sqlite:///{tmp_path}/state.db"
    url = file if request.param == "sqlite" else request.getfixturevalue(request.param).fresh_url()
    with GPUResourceManager.from_url(url, inventory=default_inventory(3)) as opened:
        yield opened


def rows(manager: GPUResourceManager, view: str) -> list[dict[str, Any]]:
    store = manager.store
    assert isinstance(store, SqlStore)
    name = store.database.dialect.quoted(view)
    found = store.database.run(
        lambda connection: (
            store.database.execute(connection, f"SELECT * FROM {name} WHERE namespace = :namespace")
            .mappings()
            .all()
        )
    )
    return [dict(row) for row in found]


def servers(manager: GPUResourceManager) -> dict[str, tuple[int, int]]:
    return {
        row["server_name"]: (int(row["available_gpus"]), int(row["available_cpus"]))
        for row in rows(manager, "gpu_servers")
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
    manager.restore(2)
    assert servers(manager)["gpu-server-2"][0] > 0


def test_allocations_have_their_state_and_times(manager: GPUResourceManager) -> None:
    manager.allocate_resources("first", 2, 4, team="vision")
    manager.allocate_resources("second", 3, 4)
    manager.release("first", outcome="SUCCESS")
    manager.allocate_resources("third", 4, 4)
    found = {row["task_id"]: row for row in rows(manager, "task_allocations")}
    assert {name: row["status"] for name, row in found.items()} == {
        "first": "SUCCESS",
        "second": "RUNNING",
        "third": "RUNNING",
    }
    assert found["first"]["end_time"] >= found["first"]["start_time"]
    assert found["second"]["end_time"] is None
    assert found["first"]["team"] == "vision"
    gpus = found["second"]["allocated_gpus"]
    assert (json.loads(gpus) if isinstance(gpus, str) else gpus) == [2, 3, 4]
    assert (found["second"]["server_id"], int(found["second"]["allocated_cpus"])) == (0, 4)


def test_a_reset_ends_what_ran_before(manager: GPUResourceManager) -> None:
    manager.allocate_resources("before", 2, 4)
    manager.reset_resources()
    manager.allocate_resources("after", 2, 4)
    found = {row["task_id"]: row["status"] for row in rows(manager, "task_allocations")}
    assert found == {"before": "RESET", "after": "RUNNING"}
    assert servers(manager)["gpu-server-0"] == (6, 60)


def test_another_inventory_is_seen_at_once(manager: GPUResourceManager) -> None:
    manager.allocate_resources("t", 2, 4)
    manager.apply_inventory(default_inventory(5))
    assert len(servers(manager)) == 5
