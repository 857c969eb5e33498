"""The memory store's history limit, and its errors for a lost state."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import Drained
from resource_manager.core.cluster import ClusterState
from resource_manager.errors import StaleStateError, StateLostError
from resource_manager.storage import MemoryStore
from tests.storage.walk import first_state

SERVER = "gpu-server-0"


def after(commits: int, history_limit: int) -> MemoryStore:
    store = MemoryStore(history_limit=history_limit)
    store.initialise(first_state())
    more(store, 0, commits)
    return store


def more(store: MemoryStore, version: int, commits: int) -> None:
    for number in range(version, version + commits):
        store.commit(number, [Drained(SERVER, float(number + 1))], now=0.0)


def versions(store: MemoryStore) -> list[int]:
    return [version for version, _ in store.history()]


def test_the_history_has_between_its_limit_and_twice_as_many_changes() -> None:
    store = after(20, history_limit=10)
    assert versions(store) == list(range(1, 21))
    more(store, 20, 1)
    assert versions(store) == list(range(12, 22)), "trimmed to the limit"
    more(store, 21, 1)
    assert versions(store) == list(range(12, 23)), "and it grows again"


def test_changes_trimmed_from_the_history_stay_in_the_state() -> None:
    store = after(21, history_limit=10)
    for replica in (None, ClusterState.from_snapshot(first_state())):
        cluster = store.refresh(replica)
        assert cluster is not None
        assert (cluster.version, cluster.node(SERVER).drained) == (21, Drained(SERVER, 21.0))


def test_missed_changes_are_complete_or_empty() -> None:
    store = after(21, history_limit=10)
    for version, missed in ((11, range(12, 22)), (15, range(16, 22)), (10, ()), (0, ())):
        with pytest.raises(StaleStateError) as caught:
            store.commit(version, [], now=0.0)
        assert [change.at for change in caught.value.missed] == list(missed)


def test_a_missing_or_older_state_is_a_lost_state() -> None:
    ahead = ClusterState.from_snapshot(first_state())
    with pytest.raises(StateLostError, match=r"^the memory store is empty, but a state was read"):
        MemoryStore().refresh(ahead)
    ahead.version = 5
    with pytest.raises(StateLostError, match="at version 2, behind 5"):
        after(2, history_limit=10).refresh(ahead)
