"""Policies by a measure of each node, recomputed only for the nodes that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import inf

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.core.node_state import NodeState

Measure = Callable[[NodeState, Request], float]
"""(node, request that fits it) -> measure; it depends only on the node's state and the request's shape."""

MAX_CLASSES = 256
"""The most request classes (`Request.shape`) whose measures are kept."""


class Measured:
    """Policy that places on the node with the least measure, on ties the first in the inventory."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """Return the placement on the best node, or None if the request fits nowhere."""
        if request.required_node is not None:
            node = next(cluster.candidates(request), None)
        else:
            best = self._measured_for(cluster, request).best()
            node = None if best is None else cluster.nodes[best]
        return None if node is None else node.place(request)

    def measures(self, cluster: ClusterState, request: Request) -> list[float]:
        """Return the measure of each node by position, infinite where the request does not fit."""
        return self._measured_for(cluster, request).measures

    def _measured_for(self, cluster: ClusterState, request: Request) -> _Kept:
        """Return the measures for the request's class, up to date with the cluster."""
        by_class: dict[object, _Kept] = cluster.policy_cache.setdefault(self, {})
        kept = by_class.get(request.shape)
        if kept is None:
            if len(by_class) >= MAX_CLASSES:
                by_class.clear()
            kept = by_class[request.shape] = _Kept()
        mark = cluster.mark
        if kept.mark != mark:
            nodes, measure = cluster.nodes, self._measure
            changed: Iterable[int] | None = cluster.changed_since(kept.mark)
            kept.mark = mark
            if changed is None:
                kept.measures, kept.ranked, changed = [inf] * len(nodes), [], range(len(nodes))
            measures, ranked = kept.measures, kept.ranked
            for index in changed:
                node = nodes[index]
                if node.fits(request):
                    measures[index] = value = measure(node, request)
                    heappush(ranked, (value, index))
                else:
                    measures[index] = inf
            if len(ranked) > 64 + 4 * len(nodes):
                ranked[:] = [(value, index) for index, value in enumerate(measures) if value < inf]
                heapify(ranked)
        return kept


class _Kept:
    """Measures of all nodes for one request class, as of a mark in the cluster's journal.

    `ranked` is a heap of (measure, position); an entry that is no longer the node's measure is dropped when
    it reaches the top.
    """

    __slots__ = ("mark", "measures", "ranked")

    def __init__(self) -> None:
        self.mark = -1
        self.measures: list[float] = []
        self.ranked: list[tuple[float, int]] = []

    def best(self) -> int | None:
        """Return the position of the node with the least measure, the first on ties, or None."""
        measures, ranked = self.measures, self.ranked
        while ranked and measures[ranked[0][1]] != ranked[0][0]:
            heappop(ranked)
        return ranked[0][1] if ranked else None


least_loaded = Measured(lambda node, request: len(node.leases))
"""Place on the node that fits with the fewest leases, the first on ties (original design, section 3.3.2)."""
