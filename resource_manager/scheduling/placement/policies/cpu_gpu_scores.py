"""Policies that weigh CPU against GPU, both relative to the largest node: weighted fit and dot product."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.models import Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.scoring import Scored


@dataclass(frozen=True, slots=True)
class Capacity:
    """Largest node: the name of its CPU resource, its amount of it, and its GPU milli."""

    cpu_name: str
    cpu: int
    gpu_milli: int


CORES = Capacity("cpus", 128, 8000)
"""CPU counted in cores, as in inventories."""

CPU_MILLI = Capacity("cpu_milli", 128_000, 8000)
"""CPU counted in thousandths of a core, as in cluster traces."""


def weighted_fit_for(largest: Capacity) -> Scored:
    """Return weighted best fit: the node that would have the least left, CPU and GPU half of the weight."""

    def score(node: NodeState, request: Request) -> int:
        cpu_left = node.free.get(largest.cpu_name, 0) - request.resources.get(largest.cpu_name, 0)
        gpu_left = node.free_milli - request.gpus * request.gpu_milli
        return int((1 - (cpu_left / largest.cpu * 0.5 + gpu_left / largest.gpu_milli * 0.5)) * 100)

    return Scored(score)


def dot_product_for(largest: Capacity) -> Scored:
    """Return the policy of the node with the lowest dot product of free and requested CPU and GPU."""

    def score(node: NodeState, request: Request) -> int:
        cpu = node.free.get(largest.cpu_name, 0) * request.resources.get(largest.cpu_name, 0)
        gpu = node.free_milli * request.gpus * request.gpu_milli
        return int(100 * (1 - (cpu / largest.cpu**2 + gpu / largest.gpu_milli**2) / 2))

    return Scored(score)


weighted_fit = weighted_fit_for(CORES)
"""Best fit as in the FGD paper (Weng et al., USENIX ATC 2023), with an integer score in hundredths."""

dot_product = dot_product_for(CORES)
"""Dot product (Grandl et al., Tetris, SIGCOMM 2014), scored as in the FGD paper."""
