"""One tick of the pool: gates, guard, arbitration and progress, interpreted or compiled from one source.

This module uses only what both Python and numba support, so interpreted and compiled ticks agree to the bit.
Sequences are flat; the three amounts of a task or node are in three sequences.

`advance` is one long function for its speed: split into functions that take the state, inlined by numba or
not, it ran 2.6 to 4 times as long compiled and 1.4 times as long interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

RUNNING, COMPLETED, DROPPED = 0, 1, 2
LIMITED_BY_MORE_THAN = 1e-9
"""A smaller cut is rounding, not an event."""

FIT_EPSILON = 1e-6
"""Tolerance for rounding when free amounts are compared."""


class Rules(NamedTuple):
    """Numbers of a scenario that are the same for every task and tick."""

    delta_t: float
    threshold: float
    memory_gate: bool
    bandwidth_gate: bool
    compute_gate: bool
    refill: float
    ceiling: float
    guard: bool
    adjust_interval: int
    boost_step: float
    max_boost: float
    decay: float
    heavy_first: bool
    bottleneck: bool
    sliced: bool


class State(NamedTuple):
    """State of a run between ticks, as lists (interpreted) or numpy arrays (compiled).

    `capacity`, `quota`, `mean_demand`, `demand`, `allowed` and `granted` are three sequences each: compute,
    memory, bandwidth. Per node: capacities, number of running tasks, their indexes in `slots` (`width` per
    node, in order of start), and sums, squares and peaks of the used amounts. Per task: quotas, the offset
    of its demand, and the state of its gates and of its work. `demand` has every started task's by tick.
    """

    capacity: Any
    running: Any
    slots: Any
    order: Any
    used: Any
    used_squared: Any
    used_peak: Any
    quota: Any
    demand_origin: Any
    pressure_tick: Any
    drop_tick: Any
    workload: Any
    mean_demand: Any
    tokens: Any
    scale: Any
    adjust_tick: Any
    allowed: Any
    granted: Any
    memory_events: Any
    bandwidth_events: Any
    compute_events: Any
    progress: Any
    outcome: Any
    demand: Any


class PendingProfiles(NamedTuple):
    """Pending tasks by profile; used only if the ledger follows usage.

    `count` tasks of a profile are pending; each needs the three amounts on a node for which `accepts` (nodes
    x profiles, flat) is true. With `by_max` a running task is allocated at least its quota.
    """

    stop_if_fits: bool
    interval: int
    by_max: bool
    count: Any
    compute: Any
    memory: Any
    bandwidth: Any
    accepts: Any


def memory_gate(demand: float, quota: float, threshold: float) -> float:
    """Return the granted memory: the demand, cut to the quota if above `threshold` times the quota."""
    return quota if demand > threshold * quota else demand


def bandwidth_bucket(
    tokens: float, demand: float, quota: float, refill: float, threshold: float, delta_t: float
) -> tuple[float, float]:
    """Refill the token bucket, then take the tokens of one tick; return (granted bandwidth, tokens left).

    A demand up to `threshold` times the quota passes even with an empty bucket; a larger one is limited
    by the tokens.
    """
    size = max(quota * refill, 1e-9)
    tokens = min(size, tokens + quota * refill * delta_t)
    spent = min(tokens, demand * delta_t)
    granted = demand
    if demand > threshold * quota and spent < demand * delta_t:
        granted = spent / delta_t
    return granted, tokens - spent


def compute_throttle(demand: float, quota: float, scale: float, ceiling: float, threshold: float) -> float:
    """Return the granted compute: above `threshold` x quota it is cut to quota x min(scale, ceiling)."""
    return min(demand, quota * min(scale, ceiling)) if demand > threshold * quota else demand


def guard_scale(scale: float, pressed: bool, step: float, max_boost: float, decay: float) -> float:
    """Return the next scale of the SLO guard: a step up to `max_boost` if pressed, else a `decay` to 1."""
    return min(max_boost, scale + step) if pressed else max(1.0, scale - decay)


def sort_by_usage(
    slots: Sequence[int], first: int, last: int, usage: Sequence[float], heavy_first: bool, order: Any
) -> None:
    """Write the tasks of slots[first:last] into `order`, by usage, ties in order of start."""
    for i in range(first, last):
        task = slots[i]
        j = i - first
        while j > 0 and (
            usage[order[j - 1]] < usage[task] if heavy_first else usage[order[j - 1]] > usage[task]
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = task


def work_done(
    compute: float,
    memory: float,
    bandwidth: float,
    mean_compute: float,
    mean_memory: float,
    mean_bandwidth: float,
) -> float:
    """Return the compute that counts as progress if the least satisfied dimension limits the task.

    The satisfaction of a dimension is the granted amount over the task's mean demand: its work needs the
    three in that proportion.
    """
    return mean_compute * min(compute / mean_compute, memory / mean_memory, bandwidth / mean_bandwidth)


def may_fit(state: State, waiting: PendingProfiles, width: int) -> bool:
    """Return True if a pending profile may fit a node, with usage as the allocated amounts.

    It may be wrong by a rounding error if True, never if False.
    """
    profiles = len(waiting.count)
    node_compute, node_memory, node_bandwidth = state.capacity
    quota_compute, quota_memory, quota_bandwidth = state.quota
    granted_compute, granted_memory, granted_bandwidth = state.granted
    for node in range(len(state.running)):
        compute = node_compute[node] + FIT_EPSILON
        memory = node_memory[node] + FIT_EPSILON
        bandwidth = node_bandwidth[node] + FIT_EPSILON
        for i in range(node * width, node * width + state.running[node]):
            task = state.slots[i]
            if waiting.by_max:
                compute -= max(granted_compute[task], quota_compute[task])
                memory -= max(granted_memory[task], quota_memory[task])
                bandwidth -= max(granted_bandwidth[task], quota_bandwidth[task])
            else:
                compute -= granted_compute[task]
                memory -= granted_memory[task]
                bandwidth -= granted_bandwidth[task]
        for kind in range(profiles):
            if (
                waiting.count[kind] > 0
                and waiting.accepts[node * profiles + kind]
                and waiting.compute[kind] <= compute
                and waiting.memory[kind] <= memory
                and waiting.bandwidth[kind] <= bandwidth
            ):
                return True
    return False


def advance(state: State, rules: Rules, waiting: PendingProfiles, width: int, tick: int, stop: int) -> int:
    """Run ticks from `tick` up to `stop`, at most to the first one in which a task ends.

    With `stop_if_fits`, it also stops before a scheduling tick with free capacity for a pending profile.
    Returns the next tick to run. Ended tasks are marked in `state.outcome` and stay in their slots.
    """
    node_compute, node_memory, node_bandwidth = state.capacity
    quota_compute, quota_memory, quota_bandwidth = state.quota
    mean_compute, mean_memory, mean_bandwidth = state.mean_demand
    demand_compute, demand_memory, demand_bandwidth = state.demand
    allowed_compute, allowed_memory, allowed_bandwidth = state.allowed
    granted_compute, granted_memory, granted_bandwidth = state.granted
    running, slots, order, demand_origin = state.running, state.slots, state.order, state.demand_origin
    used, used_squared, used_peak = state.used, state.used_squared, state.used_peak
    tokens, scale, adjust_tick = state.tokens, state.scale, state.adjust_tick
    pressure_tick, drop_tick = state.pressure_tick, state.drop_tick
    memory_events, bandwidth_events = state.memory_events, state.bandwidth_events
    compute_events = state.compute_events
    workload, progress, outcome = state.workload, state.progress, state.outcome
    delta_t, threshold, refill, ceiling = rules.delta_t, rules.threshold, rules.refill, rules.ceiling
    memory_gated, bandwidth_gated = rules.memory_gate, rules.bandwidth_gate
    compute_gated, guard, sliced, bottleneck = rules.compute_gate, rules.guard, rules.sliced, rules.bottleneck
    ended = False
    while tick < stop and not ended:
        for node in range(len(running)):
            count = running[node]
            if count == 0:
                continue
            first = node * width
            last = first + count
            sum_compute = 0.0
            sum_memory = 0.0
            sum_bandwidth = 0.0
            for i in range(first, last):
                task = slots[i]
                k = demand_origin[task] + tick
                compute = demand_compute[k]
                memory = demand_memory[k]
                bandwidth = demand_bandwidth[k]
                if memory_gated:
                    allowed = memory_gate(memory, quota_memory[task], threshold)
                    if allowed + LIMITED_BY_MORE_THAN < memory:
                        memory_events[task] += 1
                    memory = allowed
                if bandwidth_gated:
                    allowed, tokens[task] = bandwidth_bucket(
                        tokens[task], bandwidth, quota_bandwidth[task], refill, threshold, delta_t
                    )
                    if allowed + LIMITED_BY_MORE_THAN < bandwidth:
                        bandwidth_events[task] += 1
                    bandwidth = allowed
                if compute_gated:
                    if guard and tick >= adjust_tick[task]:
                        pressed = tick >= pressure_tick[task]
                        if pressed or scale[task] > 1.0:
                            scale[task] = guard_scale(
                                scale[task], pressed, rules.boost_step, rules.max_boost, rules.decay
                            )
                            adjust_tick[task] = tick + rules.adjust_interval
                    allowed = compute_throttle(compute, quota_compute[task], scale[task], ceiling, threshold)
                    if allowed + LIMITED_BY_MORE_THAN < compute:
                        compute_events[task] += 1
                    compute = allowed
                if sliced:
                    compute = min(compute, quota_compute[task])
                    memory = min(memory, quota_memory[task])
                    bandwidth = min(bandwidth, quota_bandwidth[task])
                allowed_compute[task] = compute
                allowed_memory[task] = memory
                allowed_bandwidth[task] = bandwidth
                sum_compute += compute
                sum_memory += memory
                sum_bandwidth += bandwidth
            left_compute = node_compute[node]
            left_memory = node_memory[node]
            left_bandwidth = node_bandwidth[node]
            crowded = sum_compute > left_compute or sum_memory > left_memory or sum_bandwidth > left_bandwidth
            if crowded:
                sort_by_usage(slots, first, last, allowed_compute, rules.heavy_first, order)
                sum_compute = 0.0
                sum_memory = 0.0
                sum_bandwidth = 0.0
            for i in range(count):
                task = order[i] if crowded else slots[first + i]
                compute = allowed_compute[task]
                memory = allowed_memory[task]
                bandwidth = allowed_bandwidth[task]
                if crowded:
                    compute = min(compute, left_compute)
                    memory = min(memory, left_memory)
                    bandwidth = min(bandwidth, left_bandwidth)
                    left_compute -= compute
                    left_memory -= memory
                    left_bandwidth -= bandwidth
                    sum_compute += compute
                    sum_memory += memory
                    sum_bandwidth += bandwidth
                granted_compute[task] = compute
                granted_memory[task] = memory
                granted_bandwidth[task] = bandwidth
                if bottleneck:
                    compute = work_done(
                        compute,
                        memory,
                        bandwidth,
                        mean_compute[task],
                        mean_memory[task],
                        mean_bandwidth[task],
                    )
                progress[task] += compute * delta_t
                # The sum of many small steps may end slightly below the whole by rounding.
                if progress[task] >= workload[task] * (1.0 - 1e-9):
                    outcome[task] = COMPLETED
                    ended = True
                elif tick + 1 >= drop_tick[task]:
                    outcome[task] = DROPPED
                    ended = True
            cell = 3 * node
            used[cell] += sum_compute
            used[cell + 1] += sum_memory
            used[cell + 2] += sum_bandwidth
            used_squared[cell] += sum_compute * sum_compute
            used_squared[cell + 1] += sum_memory * sum_memory
            used_squared[cell + 2] += sum_bandwidth * sum_bandwidth
            used_peak[cell] = max(used_peak[cell], sum_compute)
            used_peak[cell + 1] = max(used_peak[cell + 1], sum_memory)
            used_peak[cell + 2] = max(used_peak[cell + 2], sum_bandwidth)
        tick += 1
        if waiting.stop_if_fits and tick % waiting.interval == 0 and may_fit(state, waiting, width):
            break
    return tick


@cache
def compiled() -> Callable[[State, Rules, PendingProfiles, int, int, int], int]:
    """Return `advance` as machine code, kept in numba's cache for the next process; needs numba."""
    from numba import njit
    from numba.extending import register_jitable

    for function in (
        memory_gate,
        bandwidth_bucket,
        compute_throttle,
        guard_scale,
        sort_by_usage,
        work_done,
        may_fit,
    ):
        register_jitable(function)
    machine_code: Callable[[State, Rules, PendingProfiles, int, int, int], int]
    try:
        machine_code = njit(cache=True)(advance)
    except RuntimeError:  # numba has no writable folder for its cache
        machine_code = njit(advance)
    return machine_code
