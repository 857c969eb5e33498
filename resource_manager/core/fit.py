"""Fit of a request to a node: kind of GPU, vendor, labels and totals."""

from __future__ import annotations

from resource_manager.core.models import Node, Request


def accepted_gpu_ids(node: Node, request: Request) -> set[int]:
    """Return the ids of the node's GPUs, free or not, whose type and vendor the request accepts."""
    return {
        gpu.gpu_id
        for gpu in node.gpus
        if (not request.gpu_types or gpu.gpu_type in request.gpu_types)
        and (not request.vendor or gpu.vendor == request.vendor)
    }


def accepts_node(node: Node, request: Request) -> bool:
    """Return True if the node as a whole has a type and vendor that the request accepts."""
    if not node.gpus:
        return not request.gpu_types and (not request.vendor or node.vendor == request.vendor)
    return bool(accepted_gpu_ids(node, request))


def has_labels(node: Node, request: Request) -> bool:
    """Return True if the node has every label that the request requires."""
    return all(node.labels.get(name) == value for name, value in request.labels_required.items())


def could_ever_fit(node: Node, request: Request) -> bool:
    """Return True if the request fits the node when it is empty."""
    for name, amount in request.resources.items():
        if node.resources.get(name, 0) < amount:
            return False
    if request.required_node is not None and request.required_node != node.name:
        return False
    if not has_labels(node, request):
        return False
    if not (request.gpu_types or request.vendor):
        return len(node.gpus) >= request.gpus
    if not request.gpus:
        return accepts_node(node, request)
    return len(accepted_gpu_ids(node, request)) >= request.gpus
