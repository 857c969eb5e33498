"""Capacity that requests without a known start hold back: GPUs of their kind, and amounts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, accepted_gpu_ids
from resource_manager.core.models import Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.node_masks import uniform


@dataclass(slots=True)
class _Hold:
    """What requests for GPUs of one kind hold back on the nodes of a mask."""

    mask: int
    request: Request
    """One of them, which tells the kind of GPUs."""
    amounts: Counter[str] = field(default_factory=Counter)


class HeldBack:
    """What is held back on the nodes of `mask`; all their GPUs on those of `gpus_mask`."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._holds: dict[tuple[object, ...], _Hold] = {}
        self.mask = 0
        self.gpus_mask = 0

    def add(self, request: Request, usable: int) -> bool:
        """Hold back what the request could use, on the nodes of that mask; return True if that is more."""
        milli = request.gpu_milli if request.gpu_memory else 0  # with it, it decides which GPUs will do
        whole = (request.vendor, min(request.gpus, 2))
        kind = (usable, request.gpu_types, request.gpu_memory, milli, *whole)
        hold = self._holds.get(kind)
        is_more = hold is None
        if hold is None:
            hold = self._holds[kind] = _Hold(usable, request)
            self.mask |= usable
            if request.gpus:
                self.gpus_mask |= usable & uniform(self._cluster)
        for name, amount in request.resources.items():
            hold.amounts[name] += amount  # type: ignore[assignment]
            is_more = is_more or bool(amount)
        return is_more

    def left(self, node: NodeState, free: FreeCapacity) -> FreeCapacity:
        """Return what is left of a node's free capacity."""
        if self.mask >> node.index & 1:
            for hold in self._holds.values():
                if hold.mask >> node.index & 1:
                    gpus = dict(free.gpus)
                    if hold.request.gpus:
                        gpus |= dict.fromkeys(accepted_gpu_ids(node.node, hold.request), 0)
                    amounts = {name: had - hold.amounts[name] for name, had in free.amounts.items()}
                    free = FreeCapacity(gpus, amounts)
        return free
