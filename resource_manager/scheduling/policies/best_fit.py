"""Best fit: the node that would have the least free capacity left."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.models import MILLI_PER_GPU, Placement, Request


def best_fit(cluster: ClusterState, request: Request) -> Placement | None:
    """Place on the node that fits with the fewest free GPUs, the first on ties.

    A GPU fraction goes to the tightest GPU of all; a request without GPUs goes to the node that would have
    the smallest part of the requested resources left. Source: original design, section 3.3.2.
    """
    best: NodeState | None = None
    if request.gpus and request.gpu_milli == MILLI_PER_GPU:
        best = _fewest_whole_gpus(cluster, request)
    else:
        measure = _tightest_gpu if request.gpus else _fraction_left
        best = min(cluster.candidates(request), key=lambda node: measure(node, request), default=None)
    return None if best is None else Placement(best.name, best.pick_gpus(request))


def _fewest_whole_gpus(cluster: ClusterState, request: Request) -> NodeState | None:
    allowed = cluster.candidate_mask(request)
    for level in range(request.gpus, len(cluster.whole_free_masks)):
        for node in cluster.scan(cluster.whole_free_masks[level] & allowed, request):
            return node
    return None


def _tightest_gpu(node: NodeState, request: Request) -> float:
    return min(node.gpu_free[gpu_id] for gpu_id in node.eligible_gpus(request))


def _fraction_left(node: NodeState, request: Request) -> float:
    return sum(
        (node.free[name] - amount) / node.node.resources[name]
        for name, amount in request.resources.items()
        if amount
    )
