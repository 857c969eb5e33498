"""Results of a run: decisions, outcomes of tasks and utilisation of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.vgpu.pool import Amounts
from simulator.vgpu.scenario import Scenario
from simulator.vgpu.tasks import Task

GATES = ("memory", "bandwidth", "compute")
SHORT_DIMENSIONS = ("compute", "memory", "bandwidth")


@dataclass(frozen=True, slots=True)
class SandboxDecision:
    """Effect of sandbox and arbitration on one task in one tick; amounts by dimension."""

    tick: int
    task_id: str
    node: str
    quota: Amounts
    demand: Amounts
    allowed: Amounts
    granted: Amounts
    tokens: float
    scale: float
    progress: float


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Outcome of one task; times are seconds, None if it never started.

    `state` is completed, overtime (dropped past 1.5 deadlines), unfinished (cut off by the end of the run)
    or never_started.
    """

    task_id: str
    profile: str
    state: str
    node: str | None
    arrival_s: float
    start_s: float | None
    end_s: float
    ideal_duration_s: float
    slo_met: bool
    limiter_events: dict[str, int]

    @property
    def duration_s(self) -> float | None:
        return None if self.start_s is None else self.end_s - self.start_s

    @property
    def interference_ratio(self) -> float | None:
        """Actual over ideal duration, from start to end."""
        return None if self.start_s is None else (self.end_s - self.start_s) / self.ideal_duration_s

    @property
    def slowdown(self) -> float | None:
        """Actual over ideal duration, time in the queue included."""
        return None if self.start_s is None else (self.end_s - self.arrival_s) / self.ideal_duration_s


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Use of one dimension of a node over all ticks, as fractions of its capacity."""

    mean: float
    std: float
    peak: float


@dataclass(frozen=True, slots=True)
class ScenarioRun:
    """Results of one run."""

    scenario: Scenario
    seed: int
    tasks: tuple[Task, ...]
    outcomes: tuple[TaskOutcome, ...]
    utilisation: dict[str, dict[str, Utilisation]]
