"""Dot product: the node with the lowest dot product of free and requested CPU and GPU."""

from __future__ import annotations

from resource_manager.core.models import Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.capacity import CORES, Capacity
from resource_manager.scheduling.placement.policies.scoring import Scored


def dot_product_for(largest: Capacity) -> Scored:
    """Return the policy that measures CPU and GPU relative to the largest node."""

    def score(node: NodeState, request: Request) -> int:
        cpu = node.free.get(largest.cpu_name, 0) * request.resources.get(largest.cpu_name, 0)
        gpu = node.free_milli * request.gpus * request.gpu_milli
        return int(100 * (1 - (cpu / largest.cpu**2 + gpu / largest.gpu_milli**2) / 2))

    return Scored(score)


dot_product = dot_product_for(CORES)
"""Dot product (Grandl et al., Tetris, SIGCOMM 2014), scored as in the FGD paper."""
