"""Initial state of a run, as lists for the interpreted tick and arrays for the compiled one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.vgpu.pool import DIMENSIONS, Ledger
from simulator.vgpu.tasks import Task
from simulator.vgpu.tick import PendingProfiles, State

Pack = Callable[[NDArray[Any]], Any]


def as_array(array: NDArray[Any]) -> Any:
    """Return the array itself, for the compiled tick."""
    return array


def as_list(array: NDArray[Any]) -> Any:
    """Return a list, for the interpreted tick: Python reads a list far faster than an array."""
    return array.tolist()


def empty_state(ledger: Ledger, tasks: Sequence[Task], width: int, demand_ticks: int, pack: Pack) -> State:
    """Return the state before the first tick: `width` slots per node, `demand_ticks` ticks of demand."""
    nodes, count = len(ledger.cluster.nodes), len(tasks)
    totals = [
        np.array([state.node.resources[name] for state in ledger.cluster.nodes], dtype=np.float64)
        for name in DIMENSIONS
    ]
    workload = np.array([task.profile.workload_tflop for task in tasks], dtype=np.float64)
    means = [np.array([task.profile.demand[d] for task in tasks], dtype=np.float64) for d in range(3)]

    def reals(length: int) -> Any:
        return pack(np.zeros(length))

    def whole(length: int) -> Any:
        return pack(np.zeros(length, dtype=np.int64))

    def three(length: int) -> Any:
        return tuple(reals(length) for _ in DIMENSIONS)

    return State(
        capacity=tuple(map(pack, totals)),
        running=whole(nodes),
        slots=whole(nodes * width),
        order=whole(width),
        used=reals(3 * nodes),
        used_squared=reals(3 * nodes),
        used_peak=reals(3 * nodes),
        quota=three(count),
        demand_origin=whole(count),
        pressure_tick=whole(count),
        drop_tick=whole(count),
        workload=pack(workload),
        mean_demand=tuple(map(pack, means)),
        tokens=reals(count),
        scale=pack(np.ones(count)),
        adjust_tick=whole(count),
        allowed=three(count),
        granted=three(count),
        memory_events=whole(count),
        bandwidth_events=whole(count),
        compute_events=whole(count),
        progress=reals(count),
        outcome=whole(count),
        demand=three(demand_ticks),
    )


def no_pending(ledger: Ledger, pack: Pack) -> PendingProfiles:
    """Return the pending profiles at the start, when no task is pending."""
    scheduling, profiles = ledger.scenario.scheduling, ledger.scenario.profiles
    booked = np.array([ledger.booked(profile) for profile in profiles], dtype=np.float64)
    nodes = ledger.cluster.nodes
    accepts = [int(state.node.vendor in each.vendors) for state in nodes for each in profiles]
    return PendingProfiles(
        stop_if_fits=False,
        interval=1 if scheduling.retry_every_tick else scheduling.interval_ticks,
        by_max=scheduling.admission == "max",
        count=pack(np.zeros(len(profiles), dtype=np.int64)),
        compute=pack(booked[:, 0].copy()),
        memory=pack(booked[:, 1].copy()),
        bandwidth=pack(booked[:, 2].copy()),
        accepts=pack(np.array(accepts, dtype=np.int64)),
    )
