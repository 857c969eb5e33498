"""Random: any node that fits, drawn without hidden state so that a replay draws the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.placement.policies.fitting import Fitting

MAX_DRAWS = 16

NODES_PER_DRAW = 64
"""Nodes for each draw among all: so many draws cost about as much as to count the nodes that fit."""

Below = Callable[[int], int]
"""(limit) -> a random integer from 0 to limit - 1, a new one at each call."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Random:
    """Policy that draws with a seed."""

    seed: int = 0

    def with_seed(self, seed: int) -> Random:
        """Return the policy with another seed."""
        return Random(seed)

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        """Place on a node and GPUs of it drawn uniformly, by (seed, last fencing token)."""
        pick = _stream(self.seed, cluster.last_fencing_token)
        if request.required_node is not None:
            node = next(cluster.candidates(request), None)
        else:
            index = _draw_node(cluster, request, pick)
            node = None if index is None else cluster.nodes[index]
        if node is None:
            return None
        if not request.gpus or request.is_linked:
            return node.place(request)
        ids = node.eligible_gpus(request)
        chosen = sorted(ids.pop(pick(len(ids))) for _ in range(request.gpus))
        return Placement(node.name, tuple(chosen))


random = Random()


def _draw_node(cluster: ClusterState, request: Request, pick: Below) -> int | None:
    count = len(cluster.nodes)
    fitting = Fitting.of(cluster, request)
    for _ in range(min(MAX_DRAWS, count // NODES_PER_DRAW)):
        position = pick(count)
        if fitting.has(position):
            return position
    fits = fitting.count()
    return fitting.nth(pick(fits)) if fits else None


def _mix(value: int) -> int:
    """Return 64 well-mixed bits of an integer (Steele, Lea and Flood, SplitMix, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_start = cache(_mix)


def _stream(seed: int, position: int) -> Below:
    """Return a function that draws one integer below its argument at each call."""
    state = _mix(_start(seed) ^ position)

    def below(limit: int) -> int:
        nonlocal state
        # `_mix` inlined, because a call takes as long as the mixing itself.
        value = (state + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        state = value ^ (value >> 31)
        return state % limit

    return below
