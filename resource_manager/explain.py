"""Why a request fits or does not, server by server."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.cluster import ClusterState, NodeState, accepted_gpu_ids, accepts_node, could_ever_fit
from resource_manager.models import MILLI_PER_GPU, Request


@dataclass(frozen=True, slots=True)
class Verdict:
    """One server's answer to a request: whether it fits now, whether it could when empty, and why not."""

    node: str
    server_id: int
    fits: bool
    could_fit: bool
    reasons: tuple[str, ...]


def explain(cluster: ClusterState, request: Request) -> list[Verdict]:
    """The verdict of every server, in inventory order."""
    return [verdict(state, request) for state in cluster.nodes]


def verdict(state: NodeState, request: Request) -> Verdict:
    """What one server says to the request."""
    fits = state.fits(request)
    return Verdict(
        state.name,
        state.node.server_id,
        fits,
        fits or could_ever_fit(state.node, request),
        () if fits else tuple(_reasons(state, request)),
    )


def _reasons(state: NodeState, request: Request) -> list[str]:
    reasons: list[str] = []
    if state.retired:
        reasons.append("left the inventory")
    if state.drained is not None:
        why = f": {state.drained.reason}" if state.drained.reason else ""
        reasons.append(("failed" if state.drained.failed else "drained") + why)
    if request.required_node not in (None, state.name):
        reasons.append(f"the request is for {request.required_node} only")
    if not accepts_node(state.node, request):
        wanted = " ".join((*request.gpu_types, request.vendor)).strip()
        reasons.append(f"has no GPU of {wanted}")
    elif request.gpus:
        reasons += _gpu_reasons(state, request)
    for name, amount in request.resources.items():
        total = state.node.resources.get(name, 0)
        if total < amount:
            reasons.append(f"has {total:g} {name} in all, {amount:g} asked for")
        elif state.is_open and state.free.get(name, 0) < amount:
            reasons.append(
                f"{max(state.free.get(name, 0), 0):g} of {total:g} {name} free, {amount:g} asked for"
            )
    return reasons


def _gpu_reasons(state: NodeState, request: Request) -> list[str]:
    accepted = accepted_gpu_ids(state.node, request)
    free = len(state.eligible_gpus(request))
    if len(accepted) < request.gpus:
        return [f"has {len(accepted)} GPUs in all, {request.gpus} asked for"]
    if not state.is_open:
        return []  # nothing of a closed server is free, whatever it has unused
    if request.gpu_milli != MILLI_PER_GPU:
        most = max(state.gpu_free[gpu_id] for gpu_id in accepted)
        return [] if free else [f"at most {most} milli of one GPU free, {request.gpu_milli} asked for"]
    if free < request.gpus:
        return [f"{free} of {len(accepted)} GPUs free, {request.gpus} asked for"]
    return []
