"""Policies by a measure of each node, recomputed only for the nodes that changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.models import Placement, Request

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
            measures = self.measures(cluster, request)
            least = min(measures, default=math.inf)
            node = cluster.nodes[measures.index(least)] if least < math.inf else None
        return None if node is None else node.place(request)

    def measures(self, cluster: ClusterState, request: Request) -> list[float]:
        """Return the measure of each node by position, infinite where the request does not fit."""
        by_class: dict[object, _Kept] = cluster.policy_cache.setdefault(self, {})
        kept = by_class.get(request.shape)
        if kept is None:
            if len(by_class) >= MAX_CLASSES:
                by_class.clear()
            kept = by_class[request.shape] = _Kept()
        measures, mark = kept.measures, cluster.mark
        if kept.mark != mark:
            nodes, measure = cluster.nodes, self._measure
            changed: Iterable[int] | None = cluster.changed_since(kept.mark)
            kept.mark = mark
            if changed is None:
                changed = range(len(nodes))
                measures[:] = [math.inf] * len(nodes)
            for index in changed:
                node = nodes[index]
                measures[index] = measure(node, request) if node.fits(request) else math.inf
        return measures


class _Kept:
    """Measures of all nodes for one request class, as of a mark in the cluster's journal."""

    __slots__ = ("mark", "measures")

    def __init__(self) -> None:
        self.mark = -1
        self.measures: list[float] = []
