"""First fit: the first node, in inventory order, that the request fits."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.placement.policies.fitting import first_fitting


def first_fit(cluster: ClusterState, request: Request) -> Placement | None:
    """Place on the first node that fits, on its lowest free GPUs (original design, section 3.1)."""
    node = first_fitting(cluster, request)
    return None if node is None else node.place(request)
