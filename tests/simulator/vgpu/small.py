"""A pool of one node and tasks without fluctuation, so that figures can be calculated by hand."""

from __future__ import annotations

from dataclasses import replace

from simulator.vgpu.results import SandboxDecision, ScenarioRun
from simulator.vgpu.scenario import Card, Guard, PoolNode, Sandbox, Scenario, Scheduling
from simulator.vgpu.simulation import simulate
from simulator.vgpu.tasks import Fluctuation, Profile, Task

STEADY = Fluctuation((0, 0), (0, 0), (0, 0), (1, 1), (0, 0), (0, 0))
UNLIMITED = Sandbox(limit_threshold=1.05, compute_ceiling=2.0)


def profile(
    name: str, compute: float, memory: float, bandwidth: float, work: float, deadline: float
) -> Profile:
    return Profile(name, compute, memory, bandwidth, work, deadline, ("x",), fluctuation=STEADY)


def task(kind: Profile, arrival_s: float = 0.0, *, spike: float = 0.0) -> Task:
    """Return a task; with `spike` its demand is always 1 + spike times the mean in every dimension."""
    name = f"{kind.name}@{arrival_s:g}"
    return Task(name, kind, arrival_s, (0.0, 0.0, 0.0), 1.0, 0.0, 1.0 if spike else 0.0, spike, 7)


def scenario(
    *profiles: Profile, card: Card | None = None, seconds: float = 10.0, **parts: object
) -> Scenario:
    """Return one shared node of one card (100 TFLOPS, 100 GB, 100 GB/s), quota = demand, a pass per tick."""
    plain = Scenario(
        "small",
        seconds,
        0,
        {"card": card or Card("x", 100, 100, 100)},
        (PoolNode("n", "card", 1),),
        profiles,
        name="small",
        scheduling=Scheduling(interval_ticks=1, oversubscription=1.0),
        sandbox=UNLIMITED,
        guard=Guard(),
    )
    return replace(plain, **parts)  # type: ignore[arg-type]


def watch(
    where: Scenario, *tasks: Task, use_numba: bool = False
) -> tuple[ScenarioRun, list[SandboxDecision]]:
    """Simulate; return the run and every decision in it."""
    seen: list[SandboxDecision] = []
    run = simulate(where, 0, tasks=tasks, observers=[seen.append], use_numba=use_numba)
    return run, seen
