"""Placement policies by name; a policy reads the cluster and returns a placement, it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.errors import PolicyError
from resource_manager.scheduling.policies.best_fit import best_fit
from resource_manager.scheduling.policies.dot_product import dot_product
from resource_manager.scheduling.policies.fgd import fgd
from resource_manager.scheduling.policies.first_fit import first_fit
from resource_manager.scheduling.policies.glb import glb
from resource_manager.scheduling.policies.gpu_clustering import gpu_clustering
from resource_manager.scheduling.policies.gpu_packing import gpu_packing
from resource_manager.scheduling.policies.least_loaded import least_loaded
from resource_manager.scheduling.policies.random import random
from resource_manager.scheduling.policies.round_robin import round_robin
from resource_manager.scheduling.policies.weighted_fit import weighted_fit

Policy = Callable[[ClusterState, Request], Placement | None]

POLICIES: dict[str, Policy] = {
    "first_fit": first_fit,
    "best_fit": best_fit,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "weighted_fit": weighted_fit,
    "dot_product": dot_product,
    "gpu_packing": gpu_packing,
    "gpu_clustering": gpu_clustering,
    "fgd": fgd,
    "random": random,
    "glb": glb,
}


def nothing_fits(cluster: ClusterState, request: Request) -> Placement | None:
    """Return no placement: the policy while grants are suspended."""
    return None


ENTRY_POINT_GROUP = "gpu_resource_manager.policies"


def get_policy(name: str) -> Policy:
    """Return the policy of that name, built in or from an entry point; raises `PolicyError`."""
    policy = POLICIES.get(name)
    if policy is not None:
        return policy
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in found:
        loaded: Policy = found[name].load()
        return loaded
    known = ", ".join(sorted({*POLICIES, *found}))
    raise PolicyError(f"unknown policy {name!r}; known are {known}")


def scores_of(policy: Policy, cluster: ClusterState, request: Request) -> dict[str, int]:
    """Return the score of each node that the request fits now, by name; empty for a policy without scores."""
    scores: Callable[[ClusterState, Request], dict[str, int]] | None = getattr(policy, "scores", None)
    return {} if scores is None else scores(cluster, request)


__all__ = ["POLICIES", "Policy", "get_policy", "nothing_fits", "scores_of"]
