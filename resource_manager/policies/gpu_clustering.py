"""GPU clustering: requests of one size go together, so that nodes stay whole for the other sizes."""

from __future__ import annotations

from resource_manager.cluster import NodeState
from resource_manager.models import MILLI_PER_GPU, Request
from resource_manager.policies.scoring import Scored

FULL_NODE_MILLI = 8 * MILLI_PER_GPU
SHARE = -1


def size_of(request: Request) -> int:
    """The class of a request: a share, or its number of GPUs; 0 without GPUs."""
    return SHARE if request.gpu_milli != MILLI_PER_GPU else request.gpus


def sizes_on(node: NodeState) -> frozenset[int]:
    """The classes of the GPU requests that the node hosts."""
    requests = [lease.request for lease in node.leases.values()]
    # `size_of` written out: this is asked at every change of a node, about all that it hosts.
    sizes = {each.gpus if each.gpu_milli == MILLI_PER_GPU else SHARE for each in requests}
    sizes.discard(0)
    return frozenset(sizes)


def score(node: NodeState, request: Request, hosted: frozenset[int]) -> int:
    """Up to 100 beside its own kind only, 75 in a mixed company with it, 50 on an idle node, 25 elsewhere."""
    if not request.gpus:
        return 0
    if size_of(request) in hosted:
        company = 75 if len(hosted) == 1 else 50
    else:
        company = 0 if hosted else 25
    return company + 25 * (FULL_NODE_MILLI - node.free_milli) // FULL_NODE_MILLI


gpu_clustering = Scored(score, trait=sizes_on)
"""Keeps sizes apart (Xiao et al., Gandiva, OSDI 2018), as in the FGD paper."""
