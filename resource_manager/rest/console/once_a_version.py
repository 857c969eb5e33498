"""Values that are derived once a version of the state."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from resource_manager.core.cluster import ClusterState

T = TypeVar("T")


def once_a_version(derive: Callable[[ClusterState], T]) -> Callable[[ClusterState], T]:
    """Return the function with its last result kept for each state: all open pages ask after each change."""
    kept: WeakKeyDictionary[ClusterState, tuple[int, T]] = WeakKeyDictionary()

    @wraps(derive)
    def derived(cluster: ClusterState) -> T:
        found = kept.get(cluster)
        if found is None or found[0] != cluster.version:
            found = kept[cluster] = cluster.version, derive(cluster)
        return found[1]

    return derived
