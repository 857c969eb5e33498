"""Nodes that fit the requests of one class, for policies that need no score of them."""

from __future__ import annotations

from itertools import compress, islice

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.node_state import NodeState

MAX_CLASSES = 256
"""The most request classes (`Request.shape`) that are kept for one cluster."""

_NO, _YES, _UNCHECKED = range(3)

_FROM_BITS = bytes.maketrans(b"01", bytes([_NO, _UNCHECKED]))


class Fitting:
    """Nodes that one request class fits; a node is checked when asked for, and again once it changed."""

    __slots__ = ("_cluster", "_known", "_mark", "_request")

    def __init__(self, cluster: ClusterState, request: Request) -> None:
        self._cluster = cluster
        self._request = request
        self._mark = -1
        self._known = bytearray()

    @classmethod
    def of(cls, cluster: ClusterState, request: Request) -> Fitting:
        """Return the nodes that fit the class of the request, up to date with the cluster."""
        by_class: dict[object, Fitting] = cluster.policy_cache.setdefault(cls, {})
        fitting = by_class.get(request.shape)
        if fitting is None:
            if len(by_class) >= MAX_CLASSES:
                by_class.clear()
            fitting = by_class[request.shape] = cls(cluster, request)
        changed = cluster.changed_since(fitting._mark)
        fitting._mark = cluster.mark
        if changed is None:
            in_question = f"{cluster.candidate_mask(request):0{len(cluster.nodes)}b}"[::-1]
            fitting._known = bytearray(in_question.encode().translate(_FROM_BITS))
        else:
            known = fitting._known
            for position in changed:
                known[position] = _UNCHECKED
        return fitting

    def has(self, position: int) -> bool:
        """Return True if the node at that position fits."""
        known = self._known[position]
        if known == _UNCHECKED:
            known = self._known[position] = self._cluster.nodes[position].fits(self._request)
        return known == _YES

    def first(self, start: int = 0) -> NodeState | None:
        """Return the first node from position `start` on, wrapping, that fits."""
        known, nodes, request = self._known, self._cluster.nodes, self._request
        for begin, end in ((start, len(known)), (0, start)):
            fits = known.find(_YES, begin, end)
            position = known.find(_UNCHECKED, begin, end if fits < 0 else fits)
            while position >= 0:
                node = nodes[position]
                known[position] = node.fits(request)
                if known[position]:
                    return node
                position = known.find(_UNCHECKED, position, end if fits < 0 else fits)
            if fits >= 0:
                return nodes[fits]
        return None

    def count(self) -> int:
        """Return the number of nodes that fit."""
        known, nodes, request = self._known, self._cluster.nodes, self._request
        position = known.find(_UNCHECKED)
        while position >= 0:
            known[position] = nodes[position].fits(request)
            position = known.find(_UNCHECKED, position)
        return known.count(_YES)

    def nth(self, number: int) -> int:
        """Return the position of the node of that number, from 0, among the nodes that fit; `count` first."""
        return next(islice(compress(range(len(self._known)), self._known), number, None))


def first_fitting(cluster: ClusterState, request: Request, start: int = 0) -> NodeState | None:
    """Return the first node from position `start` on, wrapping, that the request fits now."""
    is_whole = request.gpus and request.gpu_milli == MILLI_PER_GPU
    if is_whole or request.required_node is not None:  # the index of whole GPUs is faster
        return next(cluster.candidates(request, start), None)
    return Fitting.of(cluster, request).first(start)
