"""Numbers for the states of nodes: nodes in a state of the same number fit and score alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Amount, Request
from resource_manager.core.node_state import NodeState

Trait = Callable[[NodeState], object]
"""(node) -> a hashable value that a score reads of a node besides its capacity."""

Cached = TypeVar("Cached")

_MAX_STATES = 1 << 18
_MAX_CLASSES = 1 << 12


class NodeStates:
    """States of all nodes by number, kept up to date by the cluster's journal.

    A number always means the same state; `of_node` is the number of each node's current state.
    """

    def __init__(self, cluster: ClusterState, trait: Trait | None = None) -> None:
        self.cluster = cluster
        self._trait = trait
        self._start()

    @classmethod
    def of(cls, cluster: ClusterState, owner: object, trait: Trait | None = None) -> NodeStates:
        """Return the owner's cached states of that cluster, brought up to date."""
        states: NodeStates | None = cluster.policy_cache.get(owner)
        if states is None:
            states = cluster.policy_cache[owner] = cls(cluster, trait)
        states.follow()
        return states

    def for_class(self, request: Request, make: Callable[[NodeStates, Request], Cached]) -> Cached:
        """Return the owner's cached value for this request class (`Request.shape`), made at first use."""
        kept: Cached | None = self._by_class.get(request.shape)
        if kept is None:
            if len(self._by_class) > _MAX_CLASSES:
                self._by_class.clear()
            kept = self._by_class[request.shape] = make(self, request)
        return kept

    def _start(self) -> None:
        nodes = self.cluster.nodes
        self._by_class: dict[tuple[object, ...], Any] = {}
        self._kind_numbers: dict[object, int] = {}
        self._numbers: dict[object, int] = {}
        self.members: list[int] = []
        """By state number, the nodes in that state as a bit set over their positions."""
        self.reach: list[int] = []
        """By state number, the most GPU milli that one request can get; -1 for a closed node."""
        self.free: dict[str, list[Amount]] = {name: [] for node in nodes for name in node.free}
        """Free amounts by resource and state number."""
        self.traits: list[object] = []
        """By state number, the trait."""
        self._nodes = [node.node for node in nodes]
        self._kind_of_node = [self._kind(node) for node in nodes]
        self.of_node: list[int] = []
        for index, node in enumerate(nodes):
            number = self._number(node)
            self.of_node.append(number)
            self.members[number] |= 1 << index
        self.mark = self.cluster.mark
        self.changed: dict[int, int] = {}
        """By position, the journal mark at which the node was last seen in a new state, the latest last."""
        self.changed_with_gpu: dict[int, int] = {}
        """The same without the nodes that have no GPU milli free."""

    def follow(self) -> None:
        """Bring the state numbers up to date with the cluster."""
        cluster = self.cluster
        mark = cluster.mark
        if mark == self.mark:
            return
        changed = cluster.changed_since(self.mark)
        if changed is None or len(self._numbers) > _MAX_STATES:
            self._start()
            return
        self.mark = mark
        for index in changed if len(changed) == 1 else dict.fromkeys(changed):
            node = cluster.nodes[index]
            if node.node is not self._nodes[index]:  # resized in place
                if not node.free.keys() <= self.free.keys():
                    self._start()
                    return
                self._nodes[index] = node.node
                self._kind_of_node[index] = self._kind(node)
            self._move(index, self._number(node), mark)

    def _move(self, index: int, number: int, mark: int) -> None:
        before = self.of_node[index]
        if number == before:
            return
        self.of_node[index] = number
        bit = 1 << index
        self.members[before] ^= bit
        self.members[number] |= bit
        self.changed.pop(index, None)
        self.changed[index] = mark
        self.changed_with_gpu.pop(index, None)
        if self.reach[number] > 0:
            self.changed_with_gpu[index] = mark

    def _kind(self, node: NodeState) -> int:
        gpus = tuple((gpu.gpu_type, gpu.vendor, gpu.memory_mib, gpu.is_mig) for gpu in node.node.gpus)
        kind = (
            tuple(node.gpu_free),
            gpus[:1] if node.uniform else gpus,
            node.node.vendor,
            node.node.islands,
            tuple(node.node.resources),
        )
        return self._kind_numbers.setdefault(kind, len(self._kind_numbers))

    def _number(self, node: NodeState) -> int:
        kind = self._kind_of_node[node.index]
        free = node.free
        state: tuple[object, ...] = (kind, node.is_open, *node.gpu_free.values(), *free.values())
        if len(free) != len(node.node.resources):
            state = (*state, *free)
        trait = None
        if self._trait is not None:
            trait = self._trait(node)
            state = (*state, trait)
        number = self._numbers.setdefault(state, len(self._numbers))
        if number == len(self.reach):
            self.members.append(0)
            self.reach.append(_reach(node))
            self.traits.append(trait)
            for name, amounts in self.free.items():
                amounts.append(free.get(name, 0))
        return number


def _reach(node: NodeState) -> int:
    """Return the milli of all whole free GPUs, or if there are none the most on one GPU; -1 if closed."""
    if not node.is_open:
        return -1
    return node.whole_free * MILLI_PER_GPU or max(0, 0, *node.gpu_free.values())
