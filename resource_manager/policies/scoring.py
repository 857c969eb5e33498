"""Policies that give every node an integer score: only nodes that changed since are scored again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from operator import gt
from typing import Any

from resource_manager.cluster import ClusterState, NodeState
from resource_manager.models import MILLI_PER_GPU, Amount, Placement, Request

Score = Callable[[NodeState, Request], int]
"""(node, request that fits it) -> score, the higher the better; it depends on the node's state alone."""

Pick = Callable[[NodeState, Request], tuple[int, ...]]
"""(node, request that fits it) -> ids of the GPUs to take."""

Trait = Callable[[NodeState], object]
"""What a score reads of a node beside its capacity, as a hashable value."""

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_MOST_STATES = 1 << 18
_MOST_CLASSES = 1 << 12
_UNKNOWN: Any = object()


class Scored:
    """The node of the highest score that the request fits; ties go to the first in the inventory.

    Nodes in equal state score equally, so a score is worked out once for each pair of node state and
    request class (`Request.shape`); a heap for each class holds its nodes in order.
    """

    def __init__(self, score: Score, pick: Pick = NodeState.pick_gpus, trait: Trait | None = None) -> None:
        self._score = score
        self._pick = pick
        self._trait = trait

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """The placement on the best node, or None if the request fits nowhere."""
        if request.required_node is not None:
            node = cluster.by_name.get(request.required_node)
            if node is None or not node.fits(request):
                return None
        else:
            index = self.ranking(cluster, request).best()
            if index is None:
                return None
            node = cluster.nodes[index]
        return Placement(node.name, self._pick(node, request))

    def scores(self, cluster: ClusterState, request: Request) -> dict[str, int]:
        """The score of each node that the request fits now, by node name."""
        return {node.name: self._score(node, request) for node in cluster.candidates(request)}

    def ranking(self, cluster: ClusterState, request: Request) -> Ranking:
        """The nodes that requests of this class fit, up to date with the cluster."""
        states = cluster.derived.get(self)
        if states is None:
            states = cluster.derived[self] = _States(cluster, self._trait)
        states.follow()
        ranking: Ranking | None = states.rankings.get(request.shape)
        if ranking is None:
            if len(states.rankings) > _MOST_CLASSES:
                states.rankings.clear()
            ranking = states.rankings[request.shape] = Ranking(states, self._score, request)
        ranking.follow()
        return ranking


class _States:
    """A number for the state of each node: nodes of equal number fit and score alike."""

    def __init__(self, cluster: ClusterState, trait: Trait | None) -> None:
        self.cluster = cluster
        self.rankings: dict[tuple[object, ...], Ranking] = {}
        self._trait = trait
        self._start()

    def _start(self) -> None:
        nodes = self.cluster.nodes
        self.rankings.clear()
        self._kind_numbers: dict[object, int] = {}
        self._numbers: dict[object, int] = {}
        self._nodes = [node.node for node in nodes]
        self._kinds = [self._kind(node) for node in nodes]
        self._capacities = [self._capacity(node) for node in nodes]
        self.of_node = [
            self._number(node, capacity) for node, capacity in zip(nodes, self._capacities, strict=True)
        ]
        self.reach = [_reach(node) for node in nodes]
        names = {name for node in nodes for name in node.node.resources}
        self.free = {name: [node.free.get(name, 0) for node in nodes] for name in names}
        """What each node has free, by resource."""
        self.mark = self.cluster.mark
        self.grown_at = [self.mark] * len(nodes)
        """The mark at which a node was last seen to have got some capacity back."""
        self.changed: dict[int, int] = {}
        """The mark at which each node was last seen changed, the latest last."""
        self.changed_with_gpu: dict[int, int] = {}
        """The same, less the nodes that have no GPU milli free."""

    def follow(self) -> None:
        """Brings the numbers up to date with the cluster."""
        cluster = self.cluster
        mark = cluster.mark
        if mark == self.mark:
            return
        changed = cluster.changed_since(self.mark)
        if changed is None or len(self._numbers) > _MOST_STATES:
            self._start()
            return
        self.mark = mark
        nodes = cluster.nodes
        for index in changed if len(changed) == 1 else dict.fromkeys(changed):
            node = nodes[index]
            capacity = self._capacity(node)
            before = self._capacities[index]
            if node.node is not self._nodes[index]:  # resized in place
                self._nodes[index] = node.node
                self._kinds[index] = self._kind(node)
                self.grown_at[index] = mark
            elif len(capacity) != len(before) or any(map(gt, capacity, before)):
                self.grown_at[index] = mark
            self._capacities[index] = capacity
            self.of_node[index] = self._number(node, capacity)
            self.reach[index] = reach = _reach(node)
            for name, amount in node.free.items():
                if name in self.free:
                    self.free[name][index] = amount
            self.changed.pop(index, None)
            self.changed[index] = mark
            self.changed_with_gpu.pop(index, None)
            if reach:
                self.changed_with_gpu[index] = mark

    def _kind(self, node: NodeState) -> int:
        """A number for all that does not change with leases."""
        kind = (node.node.gpus, node.node.vendor, tuple(node.node.resources))
        return self._kind_numbers.setdefault(kind, len(self._kind_numbers))

    def _capacity(self, node: NodeState) -> tuple[Amount, ...]:
        return (node.drained is None and not node.retired, *node.gpu_free.values(), *node.free.values())

    def _number(self, node: NodeState, capacity: tuple[Amount, ...]) -> int:
        state: tuple[object, ...] = (self._kinds[node.index], capacity)
        if len(node.free) != len(node.node.resources):
            state = (*state, *node.free)
        if self._trait is not None:
            state = (*state, self._trait(node))
        return self._numbers.setdefault(state, len(self._numbers))


def _reach(node: NodeState) -> int:
    """The most milli that one request can get: all whole GPUs, or what is left of the freest shared one."""
    return node.whole_free * MILLI_PER_GPU or max(node.gpu_free.values(), default=0)


class Ranking:
    """The nodes that one class of requests fits, best first.

    A node's key is its negated score above its index: the smallest key is the best node, the first on ties.
    """

    def __init__(self, states: _States, score: Score, request: Request) -> None:
        self._states = states
        self._score = score
        self._request = request
        self._keys: list[int | None] = []
        self._heap: list[int] = []
        self._scored: dict[int, int | None] = {}
        self._need = request.gpus * request.gpu_milli
        self._amounts = tuple(request.resources.items())
        self._first = next((pair for pair in self._amounts if pair[0] in states.free), None)
        self._particular = bool(request.gpu_types or request.vendor)
        self._mark = -1

    def fitting(self) -> list[int]:
        """Positions of all nodes the request fits, in order."""
        keys, reach, need = self._keys, self._states.reach, self._need
        self._heap = sorted(
            {key for key in self._heap if keys[key & _INDEX_MASK] == key and reach[key & _INDEX_MASK] >= need}
        )  # sorted keys are a heap, and what was out of date is gone
        return sorted(key & _INDEX_MASK for key in self._heap)

    def best(self) -> int | None:
        """Position of the best node, or None."""
        heap, keys, reach, need = self._heap, self._keys, self._states.reach, self._need
        while heap:
            key = heap[0]
            index = key & _INDEX_MASK
            if keys[index] == key:
                if reach[index] >= need:
                    return index
                keys[index] = None
            heappop(heap)
        return None

    def follow(self) -> None:
        """Brings the keys up to date with the node states, which must be.

        A request for GPUs passes over nodes that have none left: `best` and `fitting` look at the reach.
        """
        states = self._states
        since, self._mark = self._mark, states.mark
        if since == states.mark:
            return
        if since < 0 or len(self._heap) > 64 + 4 * len(self._keys):
            self._start()
            return
        keys, heap, scored = self._keys, self._heap, self._scored
        number_of, grown_at, reach, need = states.of_node, states.grown_at, states.reach, self._need
        free, amount = self._scarce()
        changed = states.changed_with_gpu if self._need else states.changed
        for index, changed_at in reversed(changed.items()):
            if changed_at <= since:
                break
            if keys[index] is None and grown_at[index] <= since:
                continue  # it did not fit, and has only less room now
            if reach[index] < need or free[index] < amount:
                keys[index] = None
                continue
            number = number_of[index]
            base = scored.get(number, _UNKNOWN)
            if base is _UNKNOWN:
                base = self._rate(number, index)
            if base is None:
                keys[index] = None
            elif keys[index] != (key := base + index):
                keys[index] = key
                heappush(heap, key)

    def _start(self) -> None:
        scored, need, reach = self._scored, self._need, self._states.reach
        free, amount = self._scarce()
        keys: list[int | None] = [None] * len(reach)
        heap: list[int] = []
        self._keys, self._heap = keys, heap
        for index, number in enumerate(self._states.of_node):
            if reach[index] >= need and free[index] >= amount:
                base = scored.get(number, _UNKNOWN)
                if base is _UNKNOWN:
                    base = self._rate(number, index)
                if base is not None:
                    keys[index] = key = base + index
                    heap.append(key)
        heapify(heap)

    def _scarce(self) -> tuple[Sequence[Amount], Amount]:
        """What nodes have free of the first resource asked for, and how much of it that is.

        Most nodes that do not fit lack this or GPUs, and need not be looked at any closer.
        """
        if self._first is None:
            return self._states.reach, 0
        name, amount = self._first
        return self._states.free[name], amount

    def _rate(self, number: int, index: int) -> int | None:
        node = self._states.cluster.nodes[index]
        request = self._request
        if not self._particular:  # its reach is enough: only the amounts are left to look at
            fits = node.is_open
            free = node.free
            for name, amount in self._amounts:
                if free.get(name, 0) < amount:
                    fits = False
                    break
        else:
            fits = node.fits(request)
        base = -self._score(node, request) << _INDEX_BITS if fits else None
        self._scored[number] = base
        return base
