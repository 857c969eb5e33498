"""Random: any node that fits, drawn without hidden state so that a replay draws the same."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.placement.policies import draw
from resource_manager.scheduling.placement.policies.fitting import Fitting

MAX_DRAWS = 16

NODES_PER_DRAW = 64
"""Nodes for each draw among all: so many draws cost about as much as to count the nodes that fit."""


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
        if not request.gpus or request.is_linked:
            return node.place(request)
        ids = node.eligible_gpus(request)
        chosen = sorted(ids.pop(pick(len(ids))) for _ in range(request.gpus))
        return Placement(node.name, tuple(chosen))


random = Random()


def _draw_node(cluster: ClusterState, request: Request, pick: draw.Below) -> int | None:
    count = len(cluster.nodes)
    fitting = Fitting.of(cluster, request)
    for _ in range(min(MAX_DRAWS, count // NODES_PER_DRAW)):
        position = pick(count)
        if fitting.has(position):
            return position
    fits = fitting.count()
    return fitting.nth(pick(fits)) if fits else None
