"""GPU clustering: requests of one size share nodes, so that other nodes stay free for the other sizes."""

from __future__ import annotations

from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.scoring import Scored

FULL_NODE_MILLI = 8 * MILLI_PER_GPU
FRACTION = -1


def size_of(request: Request) -> int:
    """Return the size class of a request: `FRACTION` for a GPU fraction, else its number of GPUs."""
    return FRACTION if request.gpu_milli != MILLI_PER_GPU else request.gpus


def sizes_on(node: NodeState) -> frozenset[int]:
    """Return the size classes of the GPU requests that the node hosts."""
    requests = [lease.request for lease in node.leases.values()]
    # `size_of` inlined, because this runs over all leases of a node at each of its changes.
    sizes = {each.gpus if each.gpu_milli == MILLI_PER_GPU else FRACTION for each in requests}
    sizes.discard(0)
    return frozenset(sizes)


def score(node: NodeState, request: Request, hosted: frozenset[int]) -> int:
    """Score up to 100 on a node that hosts only its size, 75 with others too, 50 idle, 25 elsewhere."""
    if not request.gpus:
        return 0
    if size_of(request) in hosted:
        company = 75 if len(hosted) == 1 else 50
    else:
        company = 0 if hosted else 25
    return company + 25 * (FULL_NODE_MILLI - node.free_milli) // FULL_NODE_MILLI


gpu_clustering = Scored(score, trait=sizes_on)
"""GPU clustering (Xiao et al., Gandiva, OSDI 2018), scored as in the FGD paper."""
