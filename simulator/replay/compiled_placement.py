"""Placement of an openb trace in machine code: the choices of the published policies.

The policies of `scheduling.placement.policies` are the specification: a property test holds both
equal, and every grant goes through `ClusterState.apply`, which refuses what does not fit. Scores are kept by
request class and node; when a class comes again, only nodes that took a pod since are scored anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
from numba import njit

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import accepts_node
from resource_manager.core.models import MILLI_PER_GPU, Amount, Node, Placement, Request
from resource_manager.scheduling.placement.policies.cpu_gpu_scores import CPU_MILLI
from resource_manager.scheduling.placement.policies.fgd import Fragmentation
from resource_manager.scheduling.placement.policies.gpu_clustering import FULL_NODE_MILLI
from resource_manager.scheduling.placement.policies.random import MAX_DRAWS, NODES_PER_DRAW

FGD, WEIGHTED_FIT, DOT_PRODUCT, GPU_PACKING, GPU_CLUSTERING, RANDOM = range(6)
POLICIES = {
    "fgd": FGD,
    "best_fit": WEIGHTED_FIT,
    "dot_product": DOT_PRODUCT,
    "gpu_packing": GPU_PACKING,
    "gpu_clustering": GPU_CLUSTERING,
    "random": RANDOM,
}
"""Name of a policy, as `openb.policy_for` takes it -> its number here."""

NOT_FITTING = -(2**31)
CPU, CPU_SQUARED = CPU_MILLI.cpu, CPU_MILLI.cpu**2
GPU, GPU_SQUARED = CPU_MILLI.gpu_milli, CPU_MILLI.gpu_milli**2


GPUS, MILLI, CPUS, MEMORY, ACCEPTS = range(5)
"""Columns of a request class: GPUs, milli of each, CPU milli, MiB, then one per node kind: 1 if accepted."""

COUNT, KIND, FREE_CPUS, FREE_MEMORY, WHOLE, LARGEST, TOTAL, FREE = range(8)
"""Columns of a node: GPUs, kind, free CPU milli and MiB, then the free milli of each GPU.

Those of the GPUs follow from the last: how many are whole, the most free milli on one, and on all together.
"""

# GPUS, MILLI and CPUS are columns of a class of the mix too, followed by its access to each node kind.
ACCESS = 3


def choose(
    nodes: Sequence[Node], arrivals: Sequence[Request], policy: str, fragmentation: Fragmentation, seed: int
) -> list[Placement | None]:
    """Return the placement of each arrival in order, as if each were committed before the next is tried."""
    kinds = {(node.gpus[:1], node.vendor): node for node in nodes}
    kind_of = {kind: number for number, kind in enumerate(kinds)}
    types = [{gpu.gpu_type for gpu in node.gpus[:1]} for node in kinds.values()]
    width = max(len(node.gpus) for node in nodes)
    classes: dict[tuple[object, ...], tuple[int, Request]] = {}
    order = [classes.setdefault(pod.shape, (len(classes), pod))[0] for pod in arrivals]
    pods = [
        (
            pod.gpus,
            pod.gpu_milli,
            *_amounts(pod.resources),
            *(accepts_node(node, pod) for node in kinds.values()),
        )
        for _, pod in classes.values()
    ]
    state = [
        (len(node.gpus), kind_of[node.gpus[:1], node.vendor], *_amounts(node.resources), 0, 0, 0)
        + (MILLI_PER_GPU,) * len(node.gpus)
        + (0,) * (width - len(node.gpus))
        for node in nodes
    ]
    mix = [
        (
            kind.gpus,
            kind.gpu_milli,
            kind.cpu,
            *(not kind.gpu_types or bool(each & {*kind.gpu_types}) for each in types),
        )
        for kind, _ in fragmentation.mix
    ]
    ids = np.zeros(sum(pod.gpus for pod in arrivals if pod.gpus <= width) + 1, np.int64)
    chosen = _place_all(
        POLICIES[policy],
        seed,
        np.array(order, np.int64),
        np.array(pods, np.int64),
        np.array(state, np.int64),
        np.zeros((len(nodes), width + 1), np.int64),
        np.array(mix, np.int64),
        np.array([share for _, share in fragmentation.mix], np.float64),
        ids,
    ).tolist()
    taken = iter(ids.tolist())
    return [
        None if index < 0 else Placement(nodes[index].name, tuple(islice(taken, pod.gpus)))
        for pod, index in zip(arrivals, chosen, strict=True)
    ]


class CompiledPolicy:
    """Policy for the arrivals of one trace, in their order: all are chosen at the first call."""

    def __init__(
        self,
        nodes: Sequence[Node],
        arrivals: Sequence[Request],
        name: str,
        fragmentation: Fragmentation,
        seed: int,
    ) -> None:
        choose(nodes[:1], arrivals[:1], name, fragmentation, seed)  # compiles, or loads what was compiled
        self._choose = partial(choose, nodes, arrivals, name, fragmentation, seed)
        self._chosen: Iterator[Placement | None] | None = None

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """Return the placement of the next arrival, which must be this request."""
        if self._chosen is None:
            self._chosen = iter(self._choose())
        return next(self._chosen)


def _amounts(resources: Mapping[str, Amount]) -> tuple[Amount, Amount]:
    return resources["cpu_milli"], resources["memory_mib"]


@njit(cache=True)
def _place_all(policy, seed, order, pods, nodes, hosts, mix, shares, ids):  # type: ignore[no-untyped-def]
    """Place the classes of `order` one after the other; return node positions, -1 where none fits."""
    total = len(nodes)
    scores = np.full((len(pods), total), NOT_FITTING, np.int64)
    seen = np.full(len(pods), -1, np.int64)
    changed = np.empty(len(order), np.int64)
    last_change = np.full(total, -1, np.int64)
    chosen = np.full(len(order), -1, np.int64)
    fragments = np.zeros(total)
    for node in range(total):
        _derive(policy, node, nodes, fragments, mix, shares)
    placed = 0
    used = 0
    for place in range(len(order)):
        pod = order[place]
        gpus, milli = pods[pod, GPUS], pods[pod, MILLI]
        taken = ids[used : used + gpus]
        best = -1
        state = _mix(_mix(seed) ^ np.uint64(placed))
        if policy == RANDOM:
            best, state = _draw_node(state, pod, pods, nodes)
        if best < 0:
            row = scores[pod]
            since = seen[pod]
            for k in range(total if since < 0 else placed - since):
                node = k if since < 0 else changed[since + k]
                if since >= 0 and last_change[node] != since + k:
                    continue  # it comes again
                row[node] = NOT_FITTING
                if _fits(pod, node, pods, nodes):
                    row[node] = _score(policy, pod, node, pods, nodes, hosts, fragments, mix, shares)[0]
            seen[pod] = placed
            best = int(np.argmax(row))
            if row[best] == NOT_FITTING:
                continue
            if policy == RANDOM:
                fitting = np.flatnonzero(row != NOT_FITTING)
                state = _mix(state)
                best = int(fitting[np.int64(state % np.uint64(len(fitting)))])
        if policy == RANDOM:
            _draw_gpus(state, best, pods[pod, MILLI], nodes, taken)
        elif gpus:
            _pick(policy, pod, best, pods, nodes, fragments, mix, shares, taken)
        for k in range(used, used + gpus):
            nodes[best, FREE + ids[k]] -= milli
        used += gpus
        nodes[best, FREE_CPUS] -= pods[pod, CPUS]
        nodes[best, FREE_MEMORY] -= pods[pod, MEMORY]
        if gpus:
            hosts[best, gpus if milli == MILLI_PER_GPU else 0] = 1
        _derive(policy, best, nodes, fragments, mix, shares)
        changed[placed] = best
        last_change[best] = placed
        chosen[place] = best
        placed += 1
    return chosen


@njit(cache=True)
def _fits(pod, node, pods, nodes):  # type: ignore[no-untyped-def]
    if nodes[node, FREE_CPUS] < pods[pod, CPUS] or nodes[node, FREE_MEMORY] < pods[pod, MEMORY]:
        return False
    gpus, milli = pods[pod, GPUS], pods[pod, MILLI]
    if nodes[node, WHOLE] < gpus and (milli == MILLI_PER_GPU or nodes[node, LARGEST] < milli):
        return False
    return pods[pod, ACCEPTS + nodes[node, KIND]] == 1


@njit(cache=True)
def _derive(policy, node, nodes, fragments, mix, shares):  # type: ignore[no-untyped-def]
    """Write the columns of a node that follow from its GPUs, and under fgd its fragmentation."""
    free = nodes[node, FREE : FREE + nodes[node, COUNT]]
    whole = largest = 0
    for milli in free:
        whole += milli == MILLI_PER_GPU
        largest = max(largest, milli)
    nodes[node, WHOLE], nodes[node, LARGEST], nodes[node, TOTAL] = whole, largest, free.sum()
    if policy == FGD:
        fragments[node] = _fragmentation(free, nodes[node, FREE_CPUS], nodes[node, KIND], mix, shares)


@njit(cache=True)
def _score(policy, pod, node, pods, nodes, hosts, fragments, mix, shares):  # type: ignore[no-untyped-def]
    """Return the score of a node that fits, and under fgd the GPU that gives it."""
    gpus, milli, free = pods[pod, GPUS], pods[pod, MILLI], nodes[node, TOTAL]
    if policy == RANDOM:
        return 0, -1
    if policy == FGD:
        return _gradient(pod, node, pods, nodes, fragments, mix, shares)
    if policy == WEIGHTED_FIT:
        cpu_left = nodes[node, FREE_CPUS] - pods[pod, CPUS]
        gpu_left = free - gpus * milli
        return int((1 - (cpu_left / CPU * 0.5 + gpu_left / GPU * 0.5)) * 100), -1
    if policy == DOT_PRODUCT:
        cpu = nodes[node, FREE_CPUS] * pods[pod, CPUS]
        gpu = free * gpus * milli
        return int(100 * (1 - (cpu / CPU_SQUARED + gpu / GPU_SQUARED) / 2)), -1
    if gpus == 0:
        return 0, -1
    if policy == GPU_PACKING:
        count = nodes[node, COUNT]
        if nodes[node, WHOLE] == count:
            return max(33 - count, count), -1
        if milli == MILLI_PER_GPU:
            return max(50 - gpus, 33), -1
        each = nodes[node, FREE : FREE + count]
        tightest = each[_tightest(each, milli)]
        if tightest == MILLI_PER_GPU:
            return 49, -1
        return max(100 - tightest * 100 // MILLI_PER_GPU // 10, 50), -1
    hosted = hosts[node].sum()
    if hosts[node, gpus if milli == MILLI_PER_GPU else 0]:
        company = 75 if hosted == 1 else 50
    else:
        company = 0 if hosted else 25
    return company + 25 * (FULL_NODE_MILLI - free) // FULL_NODE_MILLI, -1


@njit(cache=True)
def _tightest(free, milli):  # type: ignore[no-untyped-def]
    best = -1
    for gpu in range(len(free)):
        if free[gpu] >= milli and (best < 0 or free[gpu] < free[best]):
            best = gpu
    return best


@njit(cache=True)
def _pick(policy, pod, node, pods, nodes, fragments, mix, shares, ids):  # type: ignore[no-untyped-def]
    """Write the positions of the GPUs to take: the tightest for a fraction, else the first free ones."""
    free = nodes[node, FREE : FREE + nodes[node, COUNT]]
    milli = pods[pod, MILLI]
    if milli != MILLI_PER_GPU:
        ids[0] = (
            _gradient(pod, node, pods, nodes, fragments, mix, shares)[1]
            if policy == FGD
            else _tightest(free, milli)
        )
        return
    taken = 0
    for gpu in range(len(free)):
        if free[gpu] == MILLI_PER_GPU and taken < len(ids):
            ids[taken] = gpu
            taken += 1


@njit(cache=True)
def _gradient(pod, node, pods, nodes, fragments, mix, shares):  # type: ignore[no-untyped-def]
    """Return the score of `fgd.Gradient` and the position of the GPU that gives it."""
    kind, cpu = nodes[node, KIND], nodes[node, FREE_CPUS]
    gpus, milli = pods[pod, GPUS], pods[pod, MILLI]
    after = nodes[node, FREE : FREE + nodes[node, COUNT]].copy()
    before = fragments[node]
    cpu -= pods[pod, CPUS]
    if milli == MILLI_PER_GPU:
        left = gpus
        for gpu in range(len(after)):
            if left and after[gpu] == MILLI_PER_GPU:
                after[gpu] = 0
                left -= 1
        return _logistic(before - _fragmentation(after, cpu, kind, mix, shares)), -1
    best, best_gpu = -1, -1
    for gpu in range(len(after)):
        held = after[gpu]
        if held < milli:
            continue
        known = False
        for other in range(gpu):
            known = known or after[other] == held
        if not known:
            after[gpu] = held - milli
            score = _logistic(before - _fragmentation(after, cpu, kind, mix, shares))
            after[gpu] = held
            if score > best:
                best, best_gpu = score, gpu
    return best, best_gpu


@njit(cache=True)
def _logistic(fall):  # type: ignore[no-untyped-def]
    return int(1 / (1 + math.exp(-fall / MILLI_PER_GPU)) * 100)


@njit(cache=True)
def _fragmentation(free, cpu, kind, mix, shares):  # type: ignore[no-untyped-def]
    """Return F as `Fragmentation` does, with the sums in the same order."""
    total = free.sum()
    lacks_both = lacks_gpu = lacks_cpu = needs_none = needs_none_lacks_cpu = no_access = 0.0
    for k in range(len(shares)):
        whole = shares[k] * total
        has_cpu = cpu >= mix[k, CPUS]
        if mix[k, GPUS] == 0:
            if has_cpu:
                needs_none += whole
            else:
                needs_none_lacks_cpu += whole
        elif not mix[k, ACCESS + kind]:
            no_access += whole
        else:
            usable = 0
            fragment = 0
            for gpu in range(len(free)):
                if free[gpu] >= mix[k, MILLI]:
                    usable += 1
                else:
                    fragment += free[gpu]
            if usable < mix[k, GPUS]:
                if has_cpu:
                    lacks_gpu += whole
                else:
                    lacks_both += whole
            elif has_cpu:
                lacks_gpu += shares[k] * fragment
            else:
                lacks_cpu += whole
    return lacks_both + lacks_gpu + lacks_cpu + needs_none + needs_none_lacks_cpu + no_access


@njit(cache=True)
def _mix(value):  # type: ignore[no-untyped-def]
    value = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True)
def _draw_node(state, pod, pods, nodes):  # type: ignore[no-untyped-def]
    """Return the node that `random` draws among all, -1 if none of its draws fits, and the generator."""
    for _ in range(min(MAX_DRAWS, len(nodes) // NODES_PER_DRAW)):
        state = _mix(state)
        drawn = np.int64(state % np.uint64(len(nodes)))
        if _fits(pod, drawn, pods, nodes):
            return drawn, state
    return -1, state


@njit(cache=True)
def _draw_gpus(state, node, milli, nodes, ids):  # type: ignore[no-untyped-def]
    free = nodes[node, FREE : FREE + nodes[node, COUNT]]
    left = [gpu for gpu in range(len(free)) if free[gpu] >= milli]
    for k in range(len(ids)):
        state = _mix(state)
        ids[k] = left.pop(np.int64(state % np.uint64(len(left))))
    ids.sort()
