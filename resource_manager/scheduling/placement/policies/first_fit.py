"""First fit: the first node that the request fits; round robin: the first after the last one used."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.placement.policies.fitting import first_fitting


def first_fit(cluster: ClusterState, request: Request) -> Placement | None:
    """Place on the first node that fits, on its lowest free GPUs (original design, section 3.1)."""
    node = first_fitting(cluster, request)
    return None if node is None else node.place(request)


def round_robin(cluster: ClusterState, request: Request) -> Placement | None:
    """Place on the first node that fits after the last one used, wrapping (original design, section 3.3.2).

    The last node is part of the state, so all processes share one rotation.
    """
    last = cluster.by_name.get(cluster.last_node) if cluster.last_node is not None else None
    start = 0 if last is None else (last.index + 1) % len(cluster.nodes)
    node = first_fitting(cluster, request, start)
    return None if node is None else node.place(request)
