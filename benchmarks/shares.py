"""Processor time of dividing a fleet, from reading the file to the answer, as JSON in seconds.

`--data` is the folder with `instances` (see docs/simulators/shares.md). Each is the best of some runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from simulator.cli import InputErrors, print_json
from simulator.shares.division import Options, divide_fleet
from simulator.shares.instance import Instance, Job, Team, read_instance
from simulator.timing import timed

RUNS = 5
POLICIES = {
    "packed": Options("max_min", pack=True),
    "unpacked": Options("max_min"),
    "agnostic": Options("max_min", agnostic=True),
}


def best_s(run: Callable[..., object], *arguments: Any) -> float:
    """Return the least processor time of the runs."""
    times = []
    for _ in range(RUNS):
        with timed() as each:
            run(*arguments)
        times.append(each.cpu_s)
    return round(min(times), 4)


def different_jobs(count: int, within: Literal["fairness", "fifo"]) -> Instance:
    """Return jobs that are all different, of 1, 2 or 4 GPUs, in five teams, on three types of GPUs."""
    draw = random.Random(0)
    teams = {f"team{each}": Team(weight=1 + each, within=within) for each in range(5)}
    jobs = tuple(
        Job(
            str(place),
            None,
            tuple(sorted(draw.uniform(0.1, 1) for _ in range(3))),
            f"team{place % 5}",
            draw.choice((1.0, 2.0, 3.0)),
            draw.choice((1, 2, 4)),
        )
        for place in range(count)
    )
    return Instance(dict.fromkeys(("k80", "p100", "v100"), count // 4), jobs, teams, {})


def divide_file(path: Path, options: Options) -> None:
    divide_fleet(read_instance(path), options)


def divide_rows(path: Path) -> None:
    """Divide among the first job, the first two and so on."""
    whole = read_instance(path)
    for count in range(1, len(whole.jobs) + 1):
        divide_fleet(replace(whole, jobs=whole.jobs[:count]), Options("two_level"))


@click.command(cls=InputErrors, help=__doc__)
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder of the instances.")
def main(data: Path) -> None:
    found: dict[str, Any] = {
        name: {
            parts: best_s(divide_file, data / "instances" / "jobs-2048.json", replace(options, parts=parts))
            for parts in (1, 2, 4, 8)
        }
        for name, options in POLICIES.items()
    }
    found["rows"] = best_s(divide_rows, data / "instances" / "teams-fairness-measured.json")
    different = different_jobs(1024, "fairness")
    found["different_jobs"] = best_s(divide_fleet, different, Options("two_level"))
    print_json(found)


if __name__ == "__main__":
    main()
