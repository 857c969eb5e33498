"""GPU packing: first GPUs already shared, then free GPUs of a node in use, then a node that is idle."""

from __future__ import annotations

from resource_manager.cluster import NodeState
from resource_manager.models import MILLI_PER_GPU, Request
from resource_manager.policies.scoring import Scored


def score(node: NodeState, request: Request) -> int:
    """50 to 100 on GPUs in use, 33 to 50 on free ones beside some in use, below on an idle node."""
    if not request.gpus:
        return 0
    count = len(node.gpu_free)
    if node.whole_free == count:
        return max(33 - count, count)
    taken = [node.gpu_free[gpu_id] for gpu_id in node.pick_gpus(request)]
    whole = taken.count(MILLI_PER_GPU)
    if whole:
        return max(50 - whole, 33)
    return max(100 - sum(milli * 100 // MILLI_PER_GPU for milli in taken) // 10, 50)


gpu_packing = Scored(score)
"""Fills GPUs before it opens new ones (Weng et al., MLaaS in the Wild, NSDI 2022), as in the FGD paper."""
