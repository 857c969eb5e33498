"""Runs of every scenario with every seed, over several processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from simulator.sweep import processes
from simulator.vgpu.results import ScenarioRun
from simulator.vgpu.scenario import Scenario
from simulator.vgpu.simulation import simulate

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run and the seconds it took."""

    run: ScenarioRun
    wall_s: float


def run_all(
    scenarios: Mapping[Key, Scenario], seeds: Sequence[int], *, jobs: int = 1, use_numba: bool = True
) -> Iterator[tuple[Key, TimedRun]]:
    """Yield (key, run) for every seed of every scenario, in that order, independent of `jobs`."""
    work = [(key, scenario, seed, use_numba) for key, scenario in scenarios.items() for seed in seeds]
    with processes(min(jobs, len(work))) as pool:
        yield from pool.map(_run_one, work, chunksize=max(1, len(work) // (8 * jobs)))


def _run_one(work: tuple[Key, Scenario, int, bool]) -> tuple[Key, TimedRun]:
    key, scenario, seed, numba = work
    warm_up(scenario, numba)
    began = time.perf_counter()
    run = simulate(scenario, seed, use_numba=numba)
    return key, TimedRun(run, time.perf_counter() - began)


_warm = False


def warm_up(scenario: Scenario, use_numba: bool) -> None:
    """Load or compile the machine code once per process, so that no measured time contains it."""
    global _warm
    if use_numba and not _warm:
        simulate(scenario, 0, tasks=())
        _warm = True
