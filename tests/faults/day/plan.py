"""The jobs of the day and their times, drawn from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.agent.reporting import uuid

SERVERS, GPUS = 60, 4
WORKERS, WORKER_GPUS = "workers", 8
"""The machine of Airflow's workers, beside the servers, and its GPUs."""

REPORT_S = 3.0
"""Time between two reports of an agent while nothing happens."""

LAST_ARRIVAL = 0.75
"""Part of the day after which no job comes any more."""

WAVES = 30
"""Number of times at which jobs come, some of them together."""

GANGS = 0.12
"""Part of the jobs that needs several servers."""

BY_AIRFLOW = {"operator": 0.1, "with_gpus": 0.04, "task_gpu": 0.03, "slurm": 0.03}
BY_HAND = {"run": 0.3, "submit": 0.5}
WAYS = {**BY_AIRFLOW, **BY_HAND}
"""Part of the jobs that comes each way: a fifth through Airflow."""

IN_WORKER = ("with_gpus", "task_gpu")
LONGEST_IN_WORKER_S = 10.0
LONGEST_PART = 0.2
"""Part of the day that the longest job takes."""

PEOPLE = 20
"""Those who run jobs by hand, in turn, each with a token: the service answers four calls of one at once."""

LOAD = 0.7
"""Part of the GPU time of a day that jobs need, before the longest are cut; many come early, and wait."""

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
    """A job: GPUs on each of its servers, seconds of work, and the way by which it comes."""

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
    way: str = "operator"

    @property
    def dag_id(self) -> str:
        return f"day_{self.wave:02}"

    @property
    def by_hand(self) -> bool:
        """Whether a person runs it from a terminal; the others are tasks of Airflow."""
        return self.way in BY_HAND


def name_of(number: int) -> str:
    return f"gpu-{number:02}"


def uuids_of(number: int) -> list[str]:
    return [uuid(100 * number + each) for each in range(GPUS)]


def draw(seed: int, jobs: int, day_s: float) -> list[DayJob]:
    """Return the jobs; there are times of the day at which they need more GPUs than there are."""
    rng = random.Random(seed)
    drawn = [_draw(rng, number, jobs) for number in range(jobs)]
    fleet = [job for job in drawn if job.way not in (*IN_WORKER, "slurm")]
    needed = sum(job.nodes * job.gpus * job.seconds for job in fleet)
    scale = LOAD * SERVERS * GPUS * day_s / needed
    return [_scaled(job, scale, LONGEST_PART * day_s) for job in drawn]


def _draw(rng: random.Random, number: int, jobs: int) -> DayJob:
    way = rng.choices([*WAYS], [*WAYS.values()])[0]
    # What runs in a worker cannot be preempted, and search is guaranteed nothing.
    team = rng.choice(["vision", "nlp"] if way in IN_WORKER else ["vision", "nlp", "search", "search"])
    nodes = rng.choice([2, 2, 3, 4]) if way in ("operator", "submit") and rng.random() < 2 * GANGS else 1
    gpus = GPUS if nodes > 1 else rng.choice([1, 1, 2, 2, 4, 4, 4])
    may_be_told = way in ("operator", *BY_HAND)
    return DayJob(
        name=f"job_{number:04}",
        wave=int(number * WAVES / jobs),
        nodes=nodes,
        gpus=gpus if may_be_told else rng.choice([1, 1, 2]),
        seconds=min(rng.lognormvariate(3.6, 0.7), 180.0),
        team=team,
        priority=rng.choice([0, 0, 0, 1, 5]),
        preemptible=may_be_told and (team == "search" or rng.random() < 0.3),
        states_runtime=rng.random() < 0.7,
        by_service=team == "nlp",
        way=way,
    )


def _scaled(job: DayJob, scale: float, longest_s: float) -> DayJob:
    longest_s = LONGEST_IN_WORKER_S if job.way in IN_WORKER else longest_s
    return replace(job, seconds=round(min(job.seconds * scale, longest_s), 1))


def arrivals() -> list[float]:
    """Return the part of the day at which each wave comes: many in the morning, few in the evening."""
    return [LAST_ARRIVAL * (wave / WAVES) ** 1.5 for wave in range(WAVES)]


def write(jobs: list[DayJob], path: Path) -> None:
    path.write_text(json.dumps([asdict(job) for job in jobs]))


def read(path: Path) -> list[DayJob]:
    return [DayJob(**values) for values in json.loads(path.read_text())]
