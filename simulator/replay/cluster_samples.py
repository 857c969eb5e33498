"""The cluster over time: how much of it is used, busy and fragmented after all events of a time."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.scheduling.placement.policies.fgd import Fragmentation


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster after all events of one time; servers may be added and removed.

    Used is what leases cover. A closed GPU, or one that is being cleaned, is neither used nor free.
    """

    at: float
    used_milli: int
    busy_nodes: int
    pending: int
    fragmented_milli: float
    gpu_milli: int
    nodes: int
    free_milli: int


class Sampler:
    """Adds samples to a list; each costs the nodes that changed since the last."""

    def __init__(self, samples: list[Sample], fragmentation: Fragmentation) -> None:
        self._samples = samples
        self._fragmentation = fragmentation
        self._of_node: list[tuple[int, int, float, int, int]] = []
        """Used milli, busy flag (0 or 1), fragmented, total and free milli of each node, as last sampled."""
        self._totals: list[float] = []
        self._mark = -1

    def take(self, cluster: ClusterState, now: float) -> None:
        """Add the sample of this time, in place of an earlier one of it."""
        changed = cluster.changed_since(self._mark) if self._mark >= 0 else None
        if changed is None:
            self._of_node = [(0, 0, 0.0, 0, 0)] * len(cluster.nodes)
            self._totals = [0, 0, 0.0, 0, 0]
            changed = list(range(len(cluster.nodes)))
        self._mark = cluster.mark
        for index in set(changed):
            node = cluster.nodes[index]
            milli = MILLI_PER_GPU * len(node.gpu_free)
            used = sum(
                lease.request.gpu_milli * len(node.gpu_free.keys() & node.gpu_ids_of(member))
                for lease in node.leases.values()
                for member in lease.on(node.name)
            )
            lost = self._fragmentation.of_node(node)
            figures = (used, int(bool(node.leases)), lost, milli, node.free_milli)
            for place, (new, old) in enumerate(zip(figures, self._of_node[index], strict=True)):
                self._totals[place] += new - old
            self._of_node[index] = figures
        used_milli, busy_nodes, fragmented_milli, gpu_milli, free_milli = self._totals
        sample = Sample(
            now,
            int(used_milli),
            int(busy_nodes),
            len(cluster.pending),
            fragmented_milli,
            int(gpu_milli),
            len(cluster.nodes),
            int(free_milli),
        )
        if self._samples and self._samples[-1].at == now:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)
