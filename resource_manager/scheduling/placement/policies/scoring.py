"""Policies by an integer score of each node, computed incrementally: only for nodes in a new state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import is_short
from resource_manager.core.models import Amount, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.node_states import NodeStates, Trait

Score = Callable[..., int]
"""(node, request that fits it) -> score, higher is better; it depends only on the node's state.

Under a policy with a trait: (node, request that fits it, trait of the node).
"""

Pick = Callable[[NodeState, Request], tuple[int, ...]]
"""(node, request that fits it) -> ids of the GPUs to take."""

_BITS = 24
_MASK = (1 << _BITS) - 1
_UNKNOWN: Any = object()


class Scored:
    """Policy that places on the node with the highest score, on ties the first in the inventory.

    Nodes in equal states score equally, so a score is computed once for each pair of node state and request
    class (`Request.shape`); a heap for each class keeps the states in order.
    """

    def __init__(self, score: Score, pick: Pick = NodeState.pick_gpus, trait: Trait | None = None) -> None:
        self._score = score
        self._pick = pick
        self._trait = trait

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """Return the placement on the best node, or None if the request fits nowhere."""
        if request.required_node is not None or request.labels_required:  # equal states may differ in both
            nodes = cluster.candidates(request)
            node = max(nodes, key=lambda node: self.score(node, request), default=None)
            if node is None:
                return None
        else:
            index = self._ranking(cluster, request).best()
            if index is None:
                return None
            node = cluster.nodes[index]
        return Placement(node.name, self._pick(node, request))

    def scores(self, cluster: ClusterState, request: Request) -> dict[str, int]:
        """Return the score of each node that the request fits now, by node name."""
        return {node.name: self.score(node, request) for node in cluster.candidates(request)}

    def score(self, node: NodeState, request: Request) -> int:
        """Return the score of a node that the request fits."""
        if self._trait is None:
            return self._score(node, request)
        return self._score(node, request, self._trait(node))

    def _ranking(self, cluster: ClusterState, request: Request) -> Ranking:
        """Return the ranking for the request's class, up to date with the cluster."""
        ranking = NodeStates.of(cluster, self, self._trait).for_class(request, self._make)
        ranking.follow()
        return ranking

    def _make(self, states: NodeStates, request: Request) -> Ranking:
        return Ranking(states, self._score, request, with_trait=self._trait is not None)


class Ranking:
    """Node states that one request class fits, best first.

    A key packs, from high to low bits, the negated score, the position of the first node in a state and the
    state's number: the smallest key names the best node, the first on ties. A node that changes gets a key
    for its new state; its old key stays in the heap and moves to the next node of the old state when it
    reaches the top.
    """

    def __init__(self, states: NodeStates, score: Score, request: Request, *, with_trait: bool) -> None:
        self._states = states
        self._score = score
        self._request = request
        self._traits = states.traits if with_trait else None
        self._need = request.gpus * request.gpu_milli
        """Minimum reach in milli."""
        self._scarce: tuple[Sequence[Amount], Amount] = (states.reach, 0)
        """Free amounts of the first requested resource by state number, and the request's amount.

        A quick first check: most nodes that the request does not fit lack this resource or GPUs.
        """
        for name, amount in request.resources.items():
            if name in states.free:
                self._scarce = states.free[name], amount
                break
        self._keys: list[int] = []
        self._bases: dict[int, int | None] = {}
        """By state number, its key for a node at position 0; None if the request does not fit."""
        self._mark = -1

    def best(self) -> int | None:
        """Return the position of the best node, or None."""
        keys, of_node, members = self._keys, self._states.of_node, self._states.members
        while keys:
            key = keys[0]
            number, index = key & _MASK, key >> _BITS & _MASK
            if of_node[index] == number:
                return index
            others = members[number]
            if others:
                first = (others & -others).bit_length() - 1
                heapreplace(keys, key + (first - index << _BITS))
            else:
                heappop(keys)
        return None

    def follow(self) -> None:
        """Bring the keys up to date with the node states, which must be up to date themselves.

        For a GPU request, nodes that have no GPU milli left are skipped and get no key for their new state.
        """
        states = self._states
        since, self._mark = self._mark, states.mark
        if since == states.mark:
            return
        if since < 0 or len(self._keys) > 64 + 4 * len(states.of_node):
            self._start()
            return
        keys, bases, of_node = self._keys, self._bases, states.of_node
        reach, need = states.reach, self._need
        free, amount = self._scarce
        changed = states.changed_with_gpu if need else states.changed
        for index, changed_at in reversed(changed.items()):
            if changed_at <= since:
                break
            number = of_node[index]
            if reach[number] < need or (free[number] < amount and is_short(free[number], amount)):
                continue
            base = bases.get(number, _UNKNOWN)
            if base is _UNKNOWN:
                base = self._rate(number, index)
            if base is not None:
                heappush(keys, base + (index << _BITS))

    def _start(self) -> None:
        states, bases = self._states, self._bases
        members, reach, need = states.members, states.reach, self._need
        free, amount = self._scarce
        self._keys = keys = []
        for number in set(states.of_node):
            if reach[number] < need or (free[number] < amount and is_short(free[number], amount)):
                continue
            mask = members[number]
            first = (mask & -mask).bit_length() - 1
            base = bases.get(number, _UNKNOWN)
            if base is _UNKNOWN:
                base = self._rate(number, first)
            if base is not None:
                keys.append(base + (first << _BITS))
        heapify(keys)

    def _rate(self, number: int, index: int) -> int | None:
        base = None
        node = self._states.cluster.nodes[index]
        if node.fits(self._request):
            if self._traits is None:
                score = self._score(node, self._request)
            else:
                score = self._score(node, self._request, self._traits[number])
            base = (-score << 2 * _BITS) + number
        self._bases[number] = base
        return base
