"""GLB: first the vendor with the best normalised score, then its node with most left and best balance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import accepts_node, has_labels
from resource_manager.core.models import MILLI_PER_GPU, Placement, Request
from resource_manager.core.node_state import NodeState

BALANCE = 0.6
"""Weight of the remaining capacity (LRP) against balance (BRA) in a node's score."""

Amounts = tuple[tuple[str, float], ...]
"""Requested amounts by resource name."""

NO_PERFORMANCE: Mapping[str, float] = {}


def glb(
    cluster: ClusterState,
    request: Request,
    *,
    balance: float = BALANCE,
    vendor_fallback: bool = True,
    performance: Mapping[str, float] = NO_PERFORMANCE,
    uncounted: Collection[str] = (),
) -> Placement | None:
    """Place by the two-level choice of the vGPU pool (GPU-SIM's design document, steps 4.1 to 4.5).

    Vendors rank by `rank_vendors`; in the best one the node with the highest `node_score` wins, the first
    on ties. If the request fits no node of that vendor the next is tried, unless `vendor_fallback` is off.
    `performance` is the relative speed by vendor, 1 by default. Resources in `uncounted` must fit, and
    count in neither score.
    """
    demand = demand_of(request, uncounted)
    best: dict[str, tuple[float, NodeState]] = {}
    for node in cluster.candidates(request):
        score = node_score(node, demand, balance)
        vendor = vendor_of(node)
        if vendor not in best or score > best[vendor][0]:
            best[vendor] = (score, node)
    if not best:
        return None
    only_choice = vendor_fallback and len(best) == 1
    for vendor in best if only_choice else rank_vendors(cluster, request, performance, uncounted):
        if vendor in best:
            node = best[vendor][1]
            return node.place(request)
        if not vendor_fallback:
            return None
    return None


def rank_vendors(
    cluster: ClusterState,
    request: Request,
    performance: Mapping[str, float] = NO_PERFORMANCE,
    uncounted: Collection[str] = (),
) -> list[str]:
    """Return the vendors the request accepts, the best `performance / sum of (demand / free)` first.

    Free is the sum over all open nodes of the vendor; a vendor with nothing free of a requested resource
    comes last.
    """
    free: dict[str, list[float]] = {}
    demand = demand_of(request, uncounted)
    for node in cluster.nodes:
        if node.is_open and has_labels(node.node, request) and accepts_node(node.node, request):
            total = free.setdefault(vendor_of(node), [0.0] * len(demand))
            for i, (name, _) in enumerate(demand):
                total[i] += free_of(node, name)
    scores = {}
    for vendor, total in free.items():
        if any(amount <= 0 for amount in total):
            scores[vendor] = 0.0
            continue
        cost = sum(amount / left for (_, amount), left in zip(demand, total, strict=True))
        scores[vendor] = performance.get(vendor, 1.0) / cost if cost else performance.get(vendor, 1.0)
    return sorted(scores, key=lambda vendor: -scores[vendor])


def node_score(node: NodeState, demand: Amounts, balance: float = BALANCE) -> float:
    """Return `balance * LRP + (1 - balance) * BRA` over the requested resources.

    LRP is the mean part of each that would remain free, BRA is 1 minus the standard deviation of the
    utilisations after placement.
    """
    if not demand:
        return 0.0
    used = [
        1.0 - (free_of(node, name) - amount) / total if amount <= (total := total_of(node, name)) else 1.0
        for name, amount in demand  # more than there is fits by rounding, and then all of it is used
    ]
    mean = sum(used) / len(used)
    variance = sum([(share - mean) ** 2 for share in used]) / len(used)
    return balance * (1.0 - mean) + (1.0 - balance) * (1.0 - math.sqrt(variance))


def vendor_of(node: NodeState) -> str:
    """Return the node's vendor, or that of its first GPU if the node names none."""
    gpus = node.node.gpus
    return node.node.vendor or (gpus[0].vendor if gpus else "")


GPU_MILLI = "gpu_milli"
"""Resource name under which GPUs count as one more resource of a node."""


def demand_of(request: Request, uncounted: Collection[str] = ()) -> Amounts:
    """Return names and amounts of the requested resources above 0, GPUs among them in milli."""
    named = [
        (name, float(amount))
        for name, amount in request.resources.items()
        if amount > 0 and name not in uncounted
    ]
    if request.gpus:
        named.append((GPU_MILLI, float(request.gpus * request.gpu_milli)))
    return tuple(named)


def free_of(node: NodeState, name: str) -> float:
    """Return the node's free amount of the resource."""
    return node.free_milli if name == GPU_MILLI else node.free.get(name, 0)


def total_of(node: NodeState, name: str) -> float:
    """Return the node's total amount of the resource."""
    return len(node.gpu_free) * MILLI_PER_GPU if name == GPU_MILLI else node.node.resources.get(name, 0)
