"""GPU clustering: requests of one size share nodes, so that other nodes stay free for the other sizes."""

from __future__ import annotations

from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.scoring import Scored

FULL_NODE_MILLI = 8 * MILLI_PER_GPU
FRACTION = -1


def sizes_on(node: NodeState) -> frozenset[int]:
    """Return the sizes of the GPU requests that the node hosts: numbers of GPUs, and `FRACTION`."""
    requests = [lease.request for lease in node.leases.values()]
    sizes = {each.gpus if each.gpu_milli == MILLI_PER_GPU else FRACTION for each in requests}
    sizes.discard(0)
    return frozenset(sizes)


def score(node: NodeState, request: Request, hosted: frozenset[int]) -> int:
    """Score up to 100 on a node that hosts only its size, 75 with others too, 50 idle, 25 elsewhere."""
    if not request.gpus:
        return 0
    if (request.gpus if request.gpu_milli == MILLI_PER_GPU else FRACTION) in hosted:
        company = 75 if len(hosted) == 1 else 50
    else:
        company = 0 if hosted else 25
    return company + 25 * (FULL_NODE_MILLI - node.free_milli) // FULL_NODE_MILLI


gpu_clustering = Scored(score, trait=sizes_on)
"""GPU clustering (Xiao et al., Gandiva, OSDI 2018), scored as in the FGD paper."""
