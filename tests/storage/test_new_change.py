"""A new kind of change: its class, how it applies, its place in Redis and its words are all that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import pytest

from resource_manager.core import changes, cluster
from resource_manager.core.changes import Change, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.manager.wording import What, describe, matches
from resource_manager.scheduling.accounting.lives import lives_of
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.storage import Store, codec
from resource_manager.storage.history_file import StoreHistory, collect, to_lines
from resource_manager.storage.redis import layout
from simulator.replay.history import workload_of
from simulator.replay.replay import Replay
from tests.storage.walk import first_state, started

TABLES = {
    "core/changes.py": lambda: set(get_args(Change)),
    "core/cluster.py": lambda: set(cluster._APPLY),
    "storage/redis/layout.py": lambda: set(layout.OPERATIONS),
    "manager/wording.py": lambda: {codec._CHANGES[kind] for what in What for kind in what.kinds},
}
"""The product files that must know every kind, with the kinds that each knows."""


def test_four_files_know_every_kind_of_change() -> None:
    defined = [kind for kind in vars(changes).values() if isinstance(kind, type)]
    kinds = {kind for kind in defined if kind.__module__ == changes.__name__ and hasattr(kind, "at")}
    assert len(TABLES) <= 4
    assert {name: table() for name, table in TABLES.items()} == dict.fromkeys(TABLES, kinds)


@dataclass(frozen=True, slots=True)
class Inspected:
    """Somebody looked at a server and found it in order."""

    node: str
    at: float
    reason: str = ""
    by: str = ""


@pytest.fixture
def new_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the kind where those four files name it."""
    monkeypatch.setitem(codec._CHANGES, "inspected", Inspected)
    monkeypatch.setitem(codec._TAGS, Inspected, "inspected")
    monkeypatch.setitem(cluster._APPLY, Inspected, lambda state, change: state.node(change.node))
    monkeypatch.setitem(layout.OPERATIONS, Inspected, ("rule", lambda change: f"inspected:{change.node}"))
    monkeypatch.setattr(What.AGENT, "kinds", (*What.AGENT.kinds, "inspected"))


def test_a_new_kind_goes_through_stores_history_walk_words_and_replay(
    new_kind: None, open_client: Callable[[], Store]
) -> None:
    store = open_client()
    state: ClusterState = started(store)
    now = store.now()
    lease = Lease(Request("t", 1), (Placement("gpu-server-0", (0,)),), 1, now)
    made: list[object] = [Granted(lease, now), Inspected("gpu-server-1", now, "dust", "ada")]
    store.commit(state.version, made, now=now)  # type: ignore[arg-type]
    for change in made:
        state.apply(change)  # type: ignore[arg-type]
    other = open_client().refresh(None)
    assert other is not None
    assert replace(other.snapshot(), version=0) == replace(state.snapshot(), version=0)
    history = collect(StoreHistory(store))
    assert list(history.changes) == made
    assert lives_of(first_state(), history.changes).lives.keys() == {1}
    [_, entry] = StoreHistory(store).history()
    assert describe(entry) == "gpu-server-1 dust"
    assert matches(entry, "ada", What.AGENT)
    assert len(list(to_lines(history))) == 3
    replayed = Replay(workload_of(history, "history"), get_policy("first_fit"), get_order("fifo")).run()
    assert [run.started_at for run in replayed.job_runs.values()] == [now]
