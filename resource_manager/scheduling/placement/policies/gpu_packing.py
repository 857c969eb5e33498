"""GPU packing: first GPUs that are partly in use, then free GPUs of a node in use, then an idle node."""

from __future__ import annotations

from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.scoring import Scored


def score(node: NodeState, request: Request) -> int:
    """Score 50 to 100 on GPUs in use, 33 to 50 on free GPUs of a node in use, less on an idle node."""
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
"""GPU packing (Weng et al., MLaaS in the Wild, NSDI 2022), scored as in the FGD paper."""
