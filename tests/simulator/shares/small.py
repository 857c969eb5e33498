"""Small instances: as files, and as values of every kind that a file may state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from simulator.shares.instance import Instance, Job, Team


def job(name: str, **given: Any) -> dict[str, Any]:
    """Return a job that is twice as fast on the new type as on the old."""
    return {"name": name, "throughput": {"old": 1, "new": 2}} | given


def write(folder: Path, *jobs: Any, **given: Any) -> Path:
    """Write an instance with a GPU of each type, unless it is given otherwise."""
    path = folder / "instance.json"
    path.write_text(json.dumps({"gpus": {"old": 1, "new": 1}, "jobs": jobs} | given))
    return path


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Draw fleets that may lack a type, jobs of several GPUs, kinds, pairs, weights, teams of both sorts.

    A job has no throughput on a type with fewer GPUs than it needs.
    """
    number = st.floats(0.1, 5)
    types = draw(st.integers(1, 3))
    fleet = [draw(st.integers(4, 7)), *(draw(st.integers(0, 6)) for _ in range(types - 1))]
    kinds = [
        (draw(number), *(draw(st.sampled_from([0.0, 0.5, 2.0])) for _ in range(types - 1))) for _ in range(3)
    ]
    pairs = {}
    for a in range(3):
        for b in range(a, 3):
            if draw(st.booleans()):
                slower = draw(st.floats(0.3, 0.9)), draw(st.floats(0.3, 0.9))
                first = tuple(rate * slower[0] for rate in kinds[a])
                second = first if a == b else tuple(rate * slower[1] for rate in kinds[b])
                pairs[f"k{b}", f"k{a}"], pairs[f"k{a}", f"k{b}"] = (second, first), (first, second)
    teams = {
        name: Team(
            weight=draw(st.sampled_from([0.5, 1, 3])), within=draw(st.sampled_from(["fairness", "fifo"]))
        )
        for name in ("a", "b")[: draw(st.integers(1, 2))]
    }
    jobs = []
    for place in range(draw(st.integers(1, 6))):
        kind = draw(st.integers(0, 3))
        own = tuple(draw(number) for _ in range(types))
        gpus = draw(st.sampled_from([1, 1, 2, 4]))
        rates = zip(fleet, own if kind == 3 else kinds[kind], strict=True)
        jobs.append(
            Job(
                str(place),
                None if kind == 3 else f"k{kind}",
                tuple(rate if count >= gpus else 0.0 for count, rate in rates),
                draw(st.sampled_from(sorted(teams))),
                draw(st.sampled_from([0.3, 1.0, 1.0, 2.0])),
                gpus,
            )
        )
    return Instance({f"g{type}": count for type, count in enumerate(fleet)}, tuple(jobs), teams, pairs)


def rates_of(instance: Instance) -> Any:
    """Return the throughputs in units of the proportional one, a row a job, a column a type."""
    return np.array([np.array(each.rates) / instance.proportional(each) for each in instance.jobs])


def uneven_jobs(seed: int) -> Instance:
    """Draw hundreds of jobs, weights a thousand times as large as others, throughputs too."""
    draw = np.random.default_rng(seed)
    count, types = int(draw.integers(50, 500)), int(draw.integers(1, 5))
    fleet = {
        f"g{each}": int(draw.integers(4, max(6, count // int(draw.integers(1, 8))))) for each in range(types)
    }
    teams = {
        f"t{each}": Team(
            weight=float(draw.choice([1, 2, 3, 0.01, 100])),
            within="fifo" if draw.choice(["fairness", "fifo", "fifo"]) == "fifo" else "fairness",
        )
        for each in range(int(draw.integers(1, 8)))
    }
    spread = int(draw.integers(3))
    kinds = [tuple(draw.lognormal(0, 1.5, types).tolist()) for _ in range(10)]
    jobs = tuple(
        Job(
            str(place),
            None,
            tuple(draw.lognormal(0, (0, 0.3, 2)[spread], types).tolist())
            if spread
            else kinds[int(draw.integers(10))],
            f"t{draw.integers(len(teams))}",
            float(draw.choice([1, 2, 3, 0.1])),
            int(draw.choice([1, 2, 4])),
        )
        for place in range(count)
    )
    return Instance(fleet, jobs, teams, {})
