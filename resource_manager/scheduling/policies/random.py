"""Random: any node that fits, drawn without hidden state so that a replay draws the same."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.policies import draw
from resource_manager.scheduling.policies.node_states import ClassFit, NodeStates

DRAWS = 16
"""Number of draws among all nodes, before the nodes that fit are listed to draw from."""


@dataclass(frozen=True, slots=True)
class Random:
    """Policy that draws with a seed."""

    seed: int = 0

    def with_seed(self, seed: int) -> Random:
        """Return the policy with another seed."""
        return Random(seed)

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """Place on a node and GPUs of it drawn uniformly, by (seed, last fencing token)."""
        pick = draw.stream(self.seed, cluster.last_fencing_token)
        if request.required_node is not None:
            node = next(cluster.candidates(request), None)
        else:
            index = _draw_node(cluster, request, pick)
            node = None if index is None else cluster.nodes[index]
        if node is None:
            return None
        if not request.gpus:
            return Placement(node.name)
        ids = node.eligible_gpus(request)
        chosen = sorted(ids.pop(pick(len(ids))) for _ in range(request.gpus))
        return Placement(node.name, tuple(chosen))


random = Random()


def _draw_node(cluster: ClusterState, request: Request, pick: draw.Below) -> int | None:
    nodes = cluster.nodes
    for _ in range(DRAWS if nodes else 0):
        index = pick(len(nodes))
        if nodes[index].fits(request):
            return index
    fitting = NodeStates.of(cluster, Fitting).for_class(request, Fitting).positions()
    return fitting[pick(len(fitting))] if fitting else None


class Fitting:
    """Nodes that one request class fits; only nodes that changed since the last call are checked again."""

    def __init__(self, states: NodeStates, request: Request) -> None:
        self._states = states
        self._demand = ClassFit(states, request)
        self._positions: set[int] = set()
        self._mark = -1

    def positions(self) -> list[int]:
        """Return the positions in ascending order; the node states must be up to date."""
        states, fits, found = self._states, self._demand.fits, self._positions
        since, self._mark = self._mark, states.mark
        of_node = states.of_node
        if since < 0:
            free, amount = self._demand.scarce
            found.update(
                index
                for index, number in enumerate(of_node)
                if free[number] >= amount and fits(number, index)
            )
        else:
            for index, changed_at in reversed(states.changed.items()):
                if changed_at <= since:
                    break
                if fits(of_node[index], index):
                    found.add(index)
                else:
                    found.discard(index)
        return sorted(found)
