"""Weighted best fit: the node that would have the least CPU and GPU left, each half of the weight."""

from __future__ import annotations

from resource_manager.core.models import Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.capacity import CORES, Capacity
from resource_manager.scheduling.placement.policies.scoring import Scored


def weighted_fit_for(largest: Capacity) -> Scored:
    """Return the policy that measures CPU and GPU relative to the largest node."""

    def score(node: NodeState, request: Request) -> int:
        cpu_left = node.free.get(largest.cpu_name, 0) - request.resources.get(largest.cpu_name, 0)
        gpu_left = node.free_milli - request.gpus * request.gpu_milli
        return int((1 - (cpu_left / largest.cpu * 0.5 + gpu_left / largest.gpu_milli * 0.5)) * 100)

    return Scored(score)


weighted_fit = weighted_fit_for(CORES)
"""Best fit as in the FGD paper (Weng et al., USENIX ATC 2023), with an integer score in hundredths."""
