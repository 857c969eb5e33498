"""Random: any node with room, drawn without hidden state so that a replay draws the same."""

from __future__ import annotations

from functools import partial

from resource_manager.cluster import ClusterState
from resource_manager.models import Placement, Request
from resource_manager.policies import draw


def random(cluster: ClusterState, request: Request, seed: int = 0) -> Placement | None:
    """A node, and GPUs of it, drawn evenly by (seed, last fencing number, sequence)."""
    nodes = list(cluster.candidates(request))
    if not nodes:
        return None
    pick = draw.stream(seed, cluster.fencing)
    node = nodes[pick(len(nodes))]
    ids = node.eligible_gpus(request) if request.gpus else []
    chosen = sorted(ids.pop(pick(len(ids))) for _ in range(request.gpus))
    return Placement(node.name, tuple(chosen))


def seeded(seed: int) -> partial[Placement | None]:
    """The random policy with another seed."""
    return partial(random, seed=seed)
