"""Changes of leases and pending requests since a version, for callers that hold many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from resource_manager.core.changes import Announced, Change, GpuClosed, JobPlaced, Renewed, Withdrawn
from resource_manager.core.cluster import ClusterState
from resource_manager.manager import serializers
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.results import LeaseChanges
from resource_manager.storage import Store

POLL_S = 0.2
"""Time between two looks at the store's version, for all leases of a process that waits."""

MAX_CHANGES = 1000
"""Changes that are looked through; after more of them all leases are the answer."""


_OF_NO_MATTER = Renewed | JobPlaced | Announced | Withdrawn


def concerns_owners(change: Change) -> bool:
    """Return whether the owner of a lease or request has to know: not of what they did themselves.

    What is announced is neither yet, and a DAG announces many requests at once.
    """
    if isinstance(change, GpuClosed):
        return change.stop
    return bool(_lease_id_of(change)) and not isinstance(change, _OF_NO_MATTER)


def _lease_id_of(change: Any) -> str:
    """Return the id of the lease or request that a change is about; empty if it is about another thing."""
    about = next((getattr(change, name) for name in ("lease", "request") if hasattr(change, name)), change)
    return getattr(about, "lease_id", "")


def has_news(changes: LeaseChanges) -> bool:
    """Return whether anything changed, or all there is was the answer."""
    return bool(changes["is_whole"] or changes["leases"] or changes["pending"] or changes["ended"])


def since(commits: Transactions, store: Store, after: int, prefix: str) -> LeaseChanges:
    """Return what changed after a version of those whose ids begin with `prefix`, each as it is now."""
    version = commits.read(lambda cluster, now: cluster.version)
    changes: list[Change] = []
    if 0 <= after < version <= after + MAX_CHANGES:
        changes = [change for at, change in store.history(after, version - after) if at <= version]
    is_whole = len(changes) != version - after
    noted = [change for change in changes if concerns_owners(change)]
    if not (is_whole or noted):
        return _nothing(version)

    def view(cluster: ClusterState, now: float) -> LeaseChanges:
        ids = (*cluster.leases, *cluster.pending) if is_whole else sorted(_ids_of(cluster, noted))
        return _answer(cluster, version, [each for each in ids if each.startswith(prefix)], is_whole=is_whole)

    return commits.read(view)


def _nothing(version: int) -> LeaseChanges:
    return {"version": version, "is_whole": False, "leases": [], "pending": [], "ended": []}


def _ids_of(cluster: ClusterState, changes: Sequence[Change]) -> set[str]:
    ids = {_lease_id_of(change) for change in changes} - {""}
    if any(isinstance(change, GpuClosed) for change in changes):
        ids |= {lease.lease_id for lease in cluster.leases.values() if cluster.gpu_failure(lease) is not None}
    return ids


def _answer(cluster: ClusterState, version: int, ids: Iterable[str], *, is_whole: bool) -> LeaseChanges:
    answer: LeaseChanges = {**_nothing(version), "is_whole": is_whole}
    for lease_id in ids:
        lease = cluster.leases.get(lease_id)
        if lease is not None:
            answer["leases"].append(serializers.allocation(cluster, lease))
        else:
            answer["pending" if lease_id in cluster.pending else "ended"].append(lease_id)
    return answer
