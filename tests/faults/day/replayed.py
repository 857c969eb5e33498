"""Why requests waited, told by the recorded changes: what the service would have answered at each moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from resource_manager.core.changes import Change, InventoryChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.refusal import Grounds, NextPass
from resource_manager.manager.commit.rules import RuleBook
from resource_manager.scheduling.reasons.feasibility import standings

EVERY_S = 0.5
"""Time between two moments at which a wait is looked at."""

NO_REASON = ("no_capacity", "awaiting_release", "lock_busy")
"""Kinds of waits that explain no free GPU; the others name another request, a quota, a window or a rule."""

Wait = tuple[str, float, float]
"""The name of a job, since when it waited, and until when."""


K = TypeVar("K", bound=Hashable)


def reasons(changes: Sequence[Change], waits: Mapping[K, Wait]) -> dict[K, tuple[str, float]]:
    """Return for each wait the kind of its reason, and for how many seconds of it there was none.

    Nothing is told without the change that brought the servers: the state is not known then.
    """
    if not any(isinstance(change, InventoryChanged) for change in changes):
        return {}
    moments = sorted(
        (
            (begin + step * EVERY_S, name, key)
            for key, (name, begin, end) in waits.items()
            for step in _steps(end - begin)
        ),
        key=lambda moment: moment[0],
    )
    kinds: dict[K, Counter[str]] = {key: Counter() for key in waits}
    cluster, rules, applied = ClusterState([]), RuleBook(), 0
    for at, name, key in moments:
        while applied < len(changes) and changes[applied].at <= at:
            cluster.apply(changes[applied])
            applied += 1
        kinds[key][_kind(cluster, rules, name, at)] += 1
    return {key: _of(count) for key, count in kinds.items()}


def _steps(seconds: float) -> range:
    return range(max(round(seconds / EVERY_S), 1))


def _kind(cluster: ClusterState, rules: RuleBook, name: str, at: float) -> str:
    """Return the kind of the reason for which the job's request waits, empty if it has none."""
    own = {each for each in cluster.pending if each.rpartition("/")[2] == name}
    for standing in standings(cluster, rules.of(cluster).at(at), only=own):
        return "" if _is_none(standing.refusal) else str(standing.refusal.kind)
    return ""


def _is_none(why: Grounds) -> bool:
    return why.kind in NO_REASON or any(isinstance(fact, NextPass) for fact in why.facts)


def _of(kinds: Counter[str]) -> tuple[str, float]:
    none = kinds.pop("", 0)
    return max(kinds, key=kinds.__getitem__, default=""), none * EVERY_S
