"""Tasks of a run: profiles, arrivals and the demand of each task over time, from one seeded generator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

GRID_S = 0.01
"""Step (s) of a task's life for which spikes are drawn, independent of the length of a tick."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Range = tuple[NotNegative, NotNegative]


@dataclass(frozen=True, slots=True)
class Fluctuation:
    """Ranges from which each task draws the oscillation (a sine) and the spikes of its demand."""

    compute_amplitude: Range = (0.005, 0.02)
    memory_amplitude: Range = (0.005, 0.02)
    bandwidth_amplitude: Range = (0.005, 0.02)
    period_s: tuple[Positive, Positive] = (25.0, 70.0)
    spike_probability: tuple[Share, Share] = (0.0, 0.005)
    spike_amplitude: Range = (0.02, 0.08)


@dataclass(frozen=True, slots=True)
class Profile:
    """Type of task: mean demand, work, deadline after its start, and vendors it runs on.

    `window` limits arrivals to an interval, in fractions of the duration, in every arrival mode.
    """

    name: Annotated[str, Field(min_length=1)]
    compute_tflops: Positive
    memory_gb: Positive
    bandwidth_gbps: Positive
    workload_tflop: Positive
    deadline_s: Positive
    vendors: Annotated[tuple[str, ...], Field(min_length=1)]
    k_min: Annotated[int, Field(ge=1)] = 1
    k_max: Annotated[int, Field(ge=1)] = 1
    window: tuple[Share, Share] | None = None
    fluctuation: Fluctuation = field(default_factory=Fluctuation)

    @property
    def demand(self) -> tuple[float, float, float]:
        """Mean (compute TFLOPS, memory GB, bandwidth GB/s)."""
        return (self.compute_tflops, self.memory_gb, self.bandwidth_gbps)

    @property
    def ideal_duration_s(self) -> float:
        """Seconds of the work at the mean demand."""
        return self.workload_tflop / self.compute_tflops


@dataclass(frozen=True, slots=True)
class Task:
    """Task with its drawn values; `spike_seed` is the seed of its own stream of spikes."""

    task_id: str
    profile: Profile
    arrival_s: float
    amplitudes: tuple[float, float, float]
    period_s: float
    phase: float
    spike_probability: float
    spike_amplitude: float
    spike_seed: int


def generate(
    profiles: tuple[Profile, ...], count: int, duration_s: float, arrival: str, seed: int
) -> list[Task]:
    """Generate `count` tasks, the profiles in rotation, sorted by arrival; equal seeds give equal tasks."""
    draw = np.random.default_rng(seed)
    tasks = []
    for index in range(count):
        profile = profiles[index % len(profiles)]
        arrival_s = draw_arrival(draw, duration_s, arrival)
        if profile.window is not None:
            low, high = profile.window
            arrival_s = float(draw.uniform(low * duration_s, high * duration_s))
        swing = profile.fluctuation
        tasks.append(
            Task(
                task_id=f"{profile.name}-{index}",
                profile=profile,
                arrival_s=arrival_s,
                amplitudes=(
                    float(draw.uniform(*swing.compute_amplitude)),
                    float(draw.uniform(*swing.memory_amplitude)),
                    float(draw.uniform(*swing.bandwidth_amplitude)),
                ),
                period_s=float(draw.uniform(*swing.period_s)),
                spike_probability=float(draw.uniform(*swing.spike_probability)),
                spike_amplitude=float(draw.uniform(*swing.spike_amplitude)),
                phase=float(draw.random()),
                spike_seed=int(draw.integers(2**63)),
            )
        )
    return sorted(tasks, key=lambda task: task.arrival_s)


def draw_arrival(draw: np.random.Generator, duration_s: float, arrival: str) -> float:
    """Draw an arrival time (s).

    `poisson` is over the whole run (a Poisson process, given its count), `burst` has 60 % in the first
    tenth, `poisson_burst` 30 % in the tenth around the middle, `wave` is dense at both ends.
    """
    low, high = 0.0, 1.0
    if arrival == "burst":
        low, high = (0.0, 0.1) if draw.random() < 0.6 else (0.1, 1.0)
    elif arrival == "poisson_burst" and draw.random() >= 0.7:
        low, high = 0.45, 0.55
    share = float(draw.uniform(low, high))
    if arrival == "wave":
        share = (1 - math.cos(2 * math.pi * share)) / 2
    return duration_s * share


def demand_series(task: Task, start_tick: int, ticks: int, delta_t: float) -> NDArray[np.float64]:
    """Return the demand of a task by tick from its start: 3 (compute, memory, bandwidth) x `ticks`.

    Each is the mean demand times 1 + amplitude x sine (+ spike amplitude during a spike), at least 0.
    A tick longer than the grid has the mean over its grid points.
    """
    per_tick = max(1, round(delta_t / GRID_S))
    ticks_per_point = max(1, round(GRID_S / delta_t))
    points = -(-ticks // ticks_per_point) * per_tick
    draws = np.random.Generator(np.random.PCG64(task.spike_seed)).random((points, 3), dtype=np.float32)
    spikes = (draws < task.spike_probability).T
    if ticks_per_point > 1:
        spikes = np.repeat(spikes, ticks_per_point, axis=1)[:, :ticks]
    step = delta_t / per_tick
    time = (start_tick * per_tick + np.arange(spikes.shape[1])) * step
    sine = np.sin(2 * math.pi * (time / task.period_s + task.phase))
    series: NDArray[Any] = np.empty((3, ticks))
    for i, (mean, amplitude) in enumerate(zip(task.profile.demand, task.amplitudes, strict=True)):
        multiplier = 1 + amplitude * sine + task.spike_amplitude * spikes[i]
        demand = np.maximum(0.0, mean * multiplier)
        series[i] = demand if per_tick == 1 else demand.reshape(ticks, per_tick).mean(axis=1)
    return series
