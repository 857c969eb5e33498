"""Fragmentation gradient descent: the node and GPU that leave the most capacity usable by typical tasks."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, cycle

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Amount, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.policies.scoring import Scored

MIX_COVERAGE = 0.95
"""Part of all tasks that the mix covers; it consists of the most frequent task classes."""


_MAX_KNOWN = 1 << 18

MOST_RISE = 700.0
"""Rise of F in GPUs from which the score is 0 anyway, and near which the exponential leaves the floats."""


@dataclass(frozen=True, slots=True, order=True)
class TaskClass:
    """Class of a request in the mix: CPU, milli of each GPU, number of GPUs and the GPU types."""

    cpu: Amount
    gpu_milli: int
    gpus: int
    gpu_types: tuple[str, ...]


def task_class(request: Request, cpu: str = "cpus") -> TaskClass:
    """Return the class of a request; `cpu` is the name of the CPU resource."""
    milli = request.gpu_milli if request.gpus else 0
    return TaskClass(request.resources.get(cpu, 0), milli, request.gpus, request.gpu_types)


class Fragmentation:
    """Measure of a node's fragmentation F: the milli of its free GPUs that the task mix could not use.

    `counts` is the number of occurrences of each class; the most frequent ones (ties: the larger class
    first) that cover 95 % make up the mix. For a class that needs no GPU, or whose GPU type, CPU or number
    of GPUs the node lacks, all free milli are a fragment; for other classes the free milli of the GPUs with
    too little left. F is the mean over the mix, in milli. Source: Weng et al., Beware of Fragmentation,
    USENIX ATC 2023, section 3.
    """

    def __init__(self, counts: Mapping[TaskClass, int], cpu: str = "cpus") -> None:
        self.cpu = cpu
        total = sum(counts.values())
        mix: list[tuple[TaskClass, int]] = []
        covered = 0
        for kind, count in sorted(counts.items(), key=lambda item: (item[1], item[0]), reverse=True):
            if covered >= MIX_COVERAGE * total:
                break
            mix.append((kind, count))
            covered += count
        self.mix = tuple((kind, count / total / (covered / total)) for kind, count in mix)
        """Classes with their weights, which add up to one."""
        self._cpu_steps = sorted({kind.cpu for kind, _ in mix})
        self._known: dict[tuple[object, ...], float] = {}

    @classmethod
    def of(cls, requests: Iterable[Request], cpu: str = "cpus") -> Fragmentation:
        """Return the measure with the task mix of the requests."""
        return cls(Counter(task_class(request, cpu) for request in requests), cpu)

    def cpu_step(self, free: Amount) -> int:
        """Return the number of the mix's distinct CPU demands that the free amount satisfies.

        F depends on no more of the free CPU than this.
        """
        return bisect_right(self._cpu_steps, free)

    def amount(self, gpu_types: tuple[str, ...], free_milli: list[int], cpu_step: int) -> float:
        """Return F for GPUs with these free milli; `gpu_types` is one type for all, or one for each GPU."""
        if len(gpu_types) == 1:
            free_milli.sort()
        key = (gpu_types, cpu_step, *free_milli)
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = self._compute(gpu_types, free_milli, cpu_step)
        return known

    def of_node(self, node: NodeState) -> float:
        """Return F of the node in its current state."""
        if not node.free_milli:
            return 0.0
        step = self.cpu_step(node.free.get(self.cpu, 0))
        return self.amount(node.gpu_types, list(node.gpu_free.values()), step)

    def _compute(self, gpu_types: tuple[str, ...], free_milli: list[int], cpu_step: int) -> float:
        """Compute F, adding up by cause in the order of the published simulator.

        Sums of floats depend on their order, and the score is truncated to an integer: if a placement leaves
        F unchanged, the last bit decides between 49 and 50, and the published results include that bit.
        """
        cpu = self._cpu_steps[cpu_step - 1] if cpu_step else -1
        count, free = len(free_milli), sum(free_milli)
        ascending = sorted(free_milli)
        free_below = [0, *accumulate(ascending)]
        lacks_both = lacks_gpu = lacks_cpu = needs_none = needs_none_lacks_cpu = no_access = 0.0
        for kind, share in self.mix:
            has_cpu = cpu >= kind.cpu
            if not kind.gpus:
                if has_cpu:
                    needs_none += share * free
                else:
                    needs_none_lacks_cpu += share * free
                continue
            if not kind.gpu_types:
                short = bisect_left(ascending, kind.gpu_milli)
                usable, fragment = count - short, free_below[short]
            elif not any(gpu_type in kind.gpu_types for gpu_type in gpu_types):
                no_access += share * free
                continue
            else:
                usable, fragment = _of_type(kind, gpu_types, free_milli)
            if usable < kind.gpus:
                fragment = free
                if not has_cpu:
                    lacks_both += share * free
                    continue
            elif not has_cpu:
                lacks_cpu += share * free
                continue
            lacks_gpu += share * fragment
        return lacks_both + lacks_gpu + lacks_cpu + needs_none + needs_none_lacks_cpu + no_access


def _of_type(kind: TaskClass, gpu_types: tuple[str, ...], free_milli: list[int]) -> tuple[int, int]:
    """Return the number of GPUs that the class could use, and the free milli of the others."""
    usable, fragment = 0, 0
    for milli, gpu_type in zip(free_milli, cycle(gpu_types)):
        if milli >= kind.gpu_milli and gpu_type in kind.gpu_types:
            usable += 1
        else:
            fragment += milli
    return usable, fragment


class Gradient:
    """Score and choice of GPUs by the decrease of fragmentation that a placement brings.

    The score is 100 times the logistic of the decrease of F in GPUs, truncated to an integer as published.
    """

    def __init__(self, fragmentation: Fragmentation) -> None:
        self._fragmentation = fragmentation

    def score(self, node: NodeState, request: Request) -> int:
        """Return the best score over the eligible GPUs for a fraction; whole GPUs have only one choice."""
        return self._best(node, request)[0]

    def pick(self, node: NodeState, request: Request) -> tuple[int, ...]:
        """Return the GPU of highest score for a fraction, the first on ties; else the lowest free GPUs."""
        if request.gpus and request.gpu_milli != MILLI_PER_GPU:
            return (self._best(node, request)[1],)
        return node.pick_gpus(request)

    def _best(self, node: NodeState, request: Request) -> tuple[int, int]:
        measure = self._fragmentation
        types = node.gpu_types
        free = list(node.gpu_free.values())
        cpu = node.free.get(measure.cpu, 0)
        step = measure.cpu_step(cpu - request.resources.get(measure.cpu, 0))
        before = measure.amount(types, free.copy(), measure.cpu_step(cpu))
        if not request.gpus or request.gpu_milli == MILLI_PER_GPU:
            taken = node.pick_gpus(request)
            after = [0 if gpu_id in taken else milli for gpu_id, milli in node.gpu_free.items()]
            return logistic_score(before - measure.amount(types, after, step)), 0
        best = (-1, -1)
        tried: set[int] = set()
        ids = list(node.gpu_free)
        for gpu_id in node.eligible_gpus(request):
            position = ids.index(gpu_id)
            if len(types) == 1 and free[position] in tried:
                continue  # GPUs with equally much free score alike, and the first one wins ties
            tried.add(free[position])
            after = free.copy()
            after[position] -= request.gpu_milli
            score = logistic_score(before - measure.amount(types, after, step))
            if score > best[0]:
                best = (score, gpu_id)
        return best


def logistic_score(fall: float) -> int:
    """Return 100 times the logistic of a decrease of F (`fall`, in milli; taken in GPUs), truncated."""
    rise = min(-fall / MILLI_PER_GPU, MOST_RISE)
    return int(1 / (1 + math.exp(rise)) * 100)


def fgd_for(fragmentation: Fragmentation) -> Scored:
    """Return the policy that descends the fragmentation of a given task mix."""
    gradient = Gradient(fragmentation)
    return Scored(gradient.score, gradient.pick)


class LeaseMix:
    """Task mix of the live leases, and the policy for it.

    Counts enter the mix in twentieths of the total, so that the mix, and with it every score, rarely changes.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._mark = -1
        self._by_node: list[Counter[TaskClass]] = []
        self._total: Counter[TaskClass] = Counter()
        self._mix: dict[TaskClass, int] = {}
        self._policy: Scored | None = None

    def policy(self, request: Request) -> Scored:
        """Return the policy for the current mix; without any lease, the request itself is the mix."""
        self._follow()
        mix = _coarse(self._total) or {task_class(request): 1}
        if self._policy is None or mix != self._mix:
            self._cluster.policy_cache.pop(self._policy, None)
            self._mix, self._policy = mix, fgd_for(Fragmentation(mix))
        return self._policy

    def _follow(self) -> None:
        cluster = self._cluster
        changed = cluster.changed_since(self._mark)
        if changed is None:
            self._by_node = [Counter() for _ in cluster.nodes]
            self._total = Counter()
            changed = list(range(len(cluster.nodes)))
        self._mark = cluster.mark
        for index in set(changed):
            now = Counter(task_class(lease.request) for lease in cluster.nodes[index].leases.values())
            self._total.subtract(self._by_node[index])
            self._total.update(now)
            self._by_node[index] = now


def _coarse(counts: Counter[TaskClass]) -> dict[TaskClass, int]:
    total = counts.total()
    return {kind: -(-20 * count // total) for kind, count in counts.items() if count}


class LiveFgd:
    """FGD policy for the mix of the tasks that hold leases now, so that the state alone decides."""

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """Return the placement that lowers fragmentation most, or None if the request fits nowhere."""
        return self._policy(cluster, request)(cluster, request)

    def scores(self, cluster: ClusterState, request: Request) -> dict[str, int]:
        """Return the score of each node that the request fits now, by node name."""
        return self._policy(cluster, request).scores(cluster, request)

    def _policy(self, cluster: ClusterState, request: Request) -> Scored:
        demand: LeaseMix | None = cluster.policy_cache.get(self)
        if demand is None:
            demand = cluster.policy_cache[self] = LeaseMix(cluster)
        return demand.policy(request)


fgd = LiveFgd()
"""Fragmentation gradient descent (Weng et al., USENIX ATC 2023) for the mix of tasks that have leases now."""
