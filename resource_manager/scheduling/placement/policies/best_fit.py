"""Best fit: the node that would have the least free capacity left."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.measured import Measured


def best_fit(cluster: ClusterState, request: Request) -> Placement | None:
    """Place on the node that fits with the fewest free GPUs, the first on ties.

    A GPU fraction goes to the tightest GPU of all; a request without GPUs goes to the node that would have
    the smallest part of the requested resources left. Source: original design, section 3.3.2.
    """
    if not request.gpus:
        return _least_left(cluster, request)
    if request.gpu_milli != MILLI_PER_GPU:
        return _tightest(cluster, request)
    allowed = cluster.candidate_mask(request)
    for level in range(request.gpus, len(cluster.whole_free_masks)):
        for node in cluster.scan(cluster.whole_free_masks[level] & allowed, request):
            return node.place(request)
    return None


def _fraction_left(node: NodeState, request: Request) -> float:
    left = 0.0
    free, total = node.free, node.node.resources
    for name, amount in request.resources.items():
        if 0 < amount <= (whole := total.get(name, 0)):  # more than there is fits by rounding: none is left
            left += (free[name] - amount) / whole
    return left


_tightest = Measured(
    lambda node, request: min(node.gpu_free[gpu_id] for gpu_id in node.eligible_gpus(request))
)
_least_left = Measured(_fraction_left)
