"""Least loaded: the node with the fewest leases."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request


def least_loaded(cluster: ClusterState, request: Request) -> Placement | None:
    """Place on the node that fits with the fewest leases, the first on ties.

    Source: original design, section 3.3.2.
    """
    best = min(cluster.candidates(request), key=lambda node: len(node.leases), default=None)
    return None if best is None else Placement(best.name, best.pick_gpus(request))
