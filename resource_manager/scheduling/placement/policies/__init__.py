"""Placement policies by name; a policy reads the cluster and returns a placement, it changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import entry_points

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.errors import PolicyError
from resource_manager.scheduling.placement import package_policy
from resource_manager.scheduling.placement.package_policy import PackagePolicy
from resource_manager.scheduling.placement.policies.best_fit import best_fit
from resource_manager.scheduling.placement.policies.cpu_gpu_scores import dot_product, weighted_fit
from resource_manager.scheduling.placement.policies.fgd import fgd
from resource_manager.scheduling.placement.policies.first_fit import first_fit, round_robin
from resource_manager.scheduling.placement.policies.glb import glb
from resource_manager.scheduling.placement.policies.gpu_clustering import gpu_clustering
from resource_manager.scheduling.placement.policies.gpu_packing import gpu_packing
from resource_manager.scheduling.placement.policies.measured import least_loaded
from resource_manager.scheduling.placement.policies.random import random

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


def select_placement(cluster: ClusterState, request: Request, policy: Policy) -> Placement | None:
    """Return a placement on the preferred node if the request fits there, else the policy's choice."""
    if request.preferred_node is not None:
        preferred = cluster.by_name.get(request.preferred_node)
        if preferred is not None and preferred.fits(request):
            return preferred.place(request)
    return policy(cluster, request)


ENTRY_POINT_GROUP = "gpu_resource_manager.policies"


def get_policy(name: str, *, seed: int | None = None, beside: Iterable[str] = ()) -> Policy:
    """Return the policy of that name, built in or from an entry point; raises `PolicyError`.

    A policy that draws has a method `with_seed`; a `seed` makes no difference to the others. The caller knows
    the policies `beside` these itself.
    """
    policy = POLICIES.get(name)
    if policy is None:
        found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
        if name not in found:
            known = ", ".join(sorted({*POLICIES, *found, *beside}))
            raise PolicyError(f"unknown policy {name!r}; known are {known}")
        policy = PackagePolicy(found[name], package_policy.load(found[name]))
    with_seed: Callable[[int], Policy] | None = getattr(policy, "with_seed", None)
    return policy if seed is None or with_seed is None else with_seed(seed)


def package_of(name: str) -> str:
    """Return the distribution that brings a policy of an entry point; empty for a built-in one."""
    found = () if name in POLICIES else entry_points(group=ENTRY_POINT_GROUP, name=name)
    return next(map(package_policy.package_of, found), "")


def takes_seed(policy: Policy) -> bool:
    """Return True if the policy draws."""
    return hasattr(policy, "with_seed")


def scores_of(policy: Policy, cluster: ClusterState, request: Request) -> dict[str, int]:
    """Return the score of each node that the request fits now, by name; empty for a policy without scores."""
    scores: Callable[[ClusterState, Request], dict[str, int]] | None = getattr(policy, "scores", None)
    return {} if scores is None else scores(cluster, request)


def fault_of(policy: Policy) -> Callable[[ClusterState, Request], str] | None:
    """Return what says why the policy has no place for a request that fits; None for one without faults."""
    fault: Callable[[ClusterState, Request], str] | None = getattr(policy, "fault", None)
    return fault
