"""Random: any node with room, drawn without hidden state so that a replay draws the same."""

from __future__ import annotations

from functools import partial

from resource_manager.cluster import ClusterState
from resource_manager.models import Placement, Request
from resource_manager.policies import draw
from resource_manager.policies.scoring import Scored

DRAWS = 16
"""So many nodes are drawn blindly before those with room are listed to draw from."""

_anywhere = Scored(lambda node, request: 0)


def random(cluster: ClusterState, request: Request, seed: int = 0) -> Placement | None:
    """A node, and GPUs of it, drawn evenly by (seed, last fencing number)."""
    pick = draw.stream(seed, cluster.fencing)
    if request.required_node is not None:
        node = next(cluster.candidates(request), None)
    else:
        index = _draw_node(cluster, request, pick)
        node = None if index is None else cluster.nodes[index]
    if node is None:
        return None
    ids = node.eligible_gpus(request) if request.gpus else []
    chosen = sorted(ids.pop(pick(len(ids))) for _ in range(request.gpus))
    return Placement(node.name, tuple(chosen))


def _draw_node(cluster: ClusterState, request: Request, pick: draw.Below) -> int | None:
    nodes = cluster.nodes
    for _ in range(DRAWS if nodes else 0):
        index = pick(len(nodes))
        if nodes[index].fits(request):
            return index
    fitting = _anywhere.ranking(cluster, request).fitting()
    return fitting[pick(len(fitting))] if fitting else None


def seeded(seed: int) -> partial[Placement | None]:
    """The random policy with another seed."""
    return partial(random, seed=seed)
