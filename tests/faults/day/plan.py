"""The jobs of the day and their times, drawn from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

SERVERS, GPUS = 50, 4
DAY_S = 600.0
LAST_ARRIVAL = 0.75
"""Part of the day after which no job comes any more."""

WAVES = 30
"""Number of times at which jobs come, some of them together."""

GANGS = 0.12
"""Part of the jobs that needs several servers."""

BY_HAND = 1 / 3
"""Part of the jobs that people run from a terminal."""

GRACE_S = 5.0
SAVES_FOR_S = 1.0
"""Time that a preempted job needs to save its step."""

TEAMS = """
preemption = true
min_runtime = "5s"
preemption_delay = "2s"

[teams.vision]
guaranteed = 80

[teams.nlp]
guaranteed = 60

[teams.search]
"""


@dataclass(frozen=True, slots=True)
class DayJob:
    """A job: GPUs on each of its servers, seconds of work, and how it asks."""

    name: str
    wave: int
    nodes: int
    gpus: int
    seconds: float
    team: str
    priority: int
    preemptible: bool
    states_runtime: bool
    by_service: bool
    by_ssh: bool
    by_hand: bool = False
    """A person runs it from a terminal, by `gpu-manager run`; the others are tasks of Airflow."""

    @property
    def dag_id(self) -> str:
        return f"day_{self.wave:02}"


def draw(seed: int, jobs: int, day_s: float = DAY_S) -> list[DayJob]:
    """Return the jobs; there are times of the day at which they need more GPUs than there are."""
    rng = random.Random(seed)
    drawn = []
    for number in range(jobs):
        kind = rng.random()
        nodes = rng.choice([2, 2, 3, 4]) if kind < GANGS else 1
        gpus = GPUS if nodes > 1 else rng.choice([1, 1, 2, 2, 4, 4, 4])
        team = rng.choice(["vision", "nlp", "search", "search"])
        by_hand = nodes == 1 and rng.random() < BY_HAND / (1 - GANGS)
        drawn.append(
            DayJob(
                name=f"job_{number:03}",
                wave=int(number * WAVES / jobs),
                nodes=nodes,
                gpus=gpus,
                seconds=round(min(rng.lognormvariate(3.6, 0.7), 180.0) * day_s / DAY_S, 1),
                team=team,
                priority=rng.choice([0, 0, 0, 1, 5]),
                preemptible=team == "search" or rng.random() < 0.3,
                states_runtime=rng.random() < 0.7,
                by_service=team == "nlp",
                by_ssh=nodes > 1 or rng.random() < 0.2,
                by_hand=by_hand,
            )
        )
    return drawn


def arrivals() -> list[float]:
    """Return the part of the day at which each wave comes: many in the morning, few in the evening."""
    return [LAST_ARRIVAL * (wave / WAVES) ** 1.5 for wave in range(WAVES)]


def write(jobs: list[DayJob], path: Path) -> None:
    path.write_text(json.dumps([asdict(job) for job in jobs]))


def read(path: Path) -> list[DayJob]:
    return [DayJob(**values) for values in json.loads(path.read_text())]
