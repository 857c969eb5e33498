"""Hostile names in every text that a SQL store keeps: they stay data, in the tables and in the views."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.errors import SettingsError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.demand import Demand
from resource_manager.storage import open_store
from resource_manager.storage.once import Once
from resource_manager.storage.sql.store import SqlStore

SQL = (
    *(
        "'; DROP TABLE gpu_manager_state; --",
        "x' OR '1'='1",
        '"; DROP SCHEMA x CASCADE; --',
        "\\'; --",
    ),
    *(":namespace", "%s%(x)s", "{state}", "{now}", "$1", "?", "/*", "a\\u0000b", "\\ud800", "${x}", "\\"),
)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_names_stay_data_in_tables_and_views(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(kind).fresh_url()
    with closing(open_store(url)) as store:
        assert isinstance(store, SqlStore)
        manager = GPUResourceManager(store=store, inventory=default_inventory(3))
        for name in SQL:
            demand = Demand.of(name, 2, 1, team=name, owner=name, labels={name: name})
            granted: Any = manager.try_allocate(demand, once=Once(name, name, "h"))
            again: Any = manager.try_allocate(demand, once=Once(name, name, "h"))
            assert (granted["fencing_token"], granted["owner"]) == (again["fencing_token"], name)
            assert manager.drain(1, reason=name)
            assert manager.resume(1)
            assert manager.release_resources(name, outcome=name)
        store.reports.put("'; --", b"report", b"record", 30)
        assert store.reports.records(["'; --"]) == {"'; --": b"record"}
        database = store.database
        view = database.dialect.quoted("task_allocations")
        query = f"SELECT task_id FROM {view} WHERE namespace = :namespace"
        rows = database.run(lambda connection: database.execute(connection, query).fetchall())
        assert {task_id for (task_id,) in rows} == set(SQL)


@pytest.mark.parametrize("namespace", ["a'b", 'a"b', "a;b", "a b", "a%0Ab", "a%27b", "ä", "a" * 101])
def test_a_namespace_has_safe_characters_only(namespace: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a namespace may have"):
        open_store(f"sqlite:///{tmp_path}/state.db?namespace={namespace}")
