"""Scores of the edge policies, and the time of planning and scoring on one core.

`--data` is the folder with `test0`, `test1`, ... (see docs/simulators/edge.md); without it, three generated
datasets are used. Times are processor time; the compilation of the timetable's search, once per
installation, is not counted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from simulator.cli import BadInput, InputErrors, print_json
from simulator.edge.command import POLICIES
from simulator.edge.dataset import TIERS, Dataset
from simulator.edge.dataset_files import read_dataset
from simulator.edge.plan import Plan, read_plan
from simulator.edge.published import published_score
from simulator.edge.random_dataset import generate
from simulator.edge.scorer import score_plan


def scoring_speed(dataset: Dataset, plan: Plan, repeats: int = 3) -> float:
    """Return simulated seconds per second, the best of `repeats` runs."""
    speeds = []
    for _ in range(repeats):
        began = time.process_time()
        score = score_plan(dataset, plan)
        speeds.append(score.simulated_s / (time.process_time() - began))
    return max(speeds)


def measure(dataset: Dataset, tiers: str, policy: str) -> dict[str, Any]:
    began = time.process_time()
    plan = POLICIES[policy](dataset, TIERS[tiers]).plan
    planning_s = time.process_time() - began
    score = score_plan(dataset, plan)
    return {
        "dataset": dataset.name,
        "tiers": tiers,
        "policy": policy,
        "score": score.score,
        "published": published_score(dataset.name, tiers),
        "job_rate": score.job_rate,
        "planning_s": round(planning_s, 1),
        "scoring_simulated_s_per_s": round(scoring_speed(dataset, plan)),
    }


@click.command(cls=InputErrors, help=__doc__)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of datasets.")
@click.option(
    "--policy", "policies", type=click.Choice(list(POLICIES)), multiple=True, help="All by default."
)
@click.option("--tiers", "some_tiers", type=click.Choice(list(TIERS)), multiple=True, help="All by default.")
@click.option("--json", "as_json", is_flag=True)
def main(data: Path | None, policies: tuple[str, ...], some_tiers: tuple[str, ...], as_json: bool) -> None:
    if data is None:
        datasets = [generate(seed, jobs=60) for seed in range(3)]
    else:
        datasets = [read_dataset(folder) for folder in sorted(data.glob("test*"))]
    if not datasets:
        raise BadInput(f"--data {data} has no folder test0, test1, …")
    policies = policies or tuple(POLICIES)
    if "timetable" in policies:
        POLICIES["timetable"](generate(0, jobs=2))  # compiles the search before the measurement
    rows = []
    for dataset in datasets:
        for policy in policies:
            for tiers in some_tiers or TIERS:
                rows.append(measure(dataset, tiers, policy))
                if not as_json:
                    print(*rows[-1].values(), sep="\t", flush=True)
    plans = None if data is None else data / "published_plans"
    published = [
        scoring_speed(dataset, read_plan(plans / dataset.name, dataset))
        for dataset in datasets
        if plans is not None and (plans / dataset.name).is_dir()
    ]
    summary = {
        "rows": rows,
        "slowest_planning_s": max(row["planning_s"] for row in rows),
        "slowest_scoring": min(row["scoring_simulated_s_per_s"] for row in rows),
        "slowest_scoring_of_published_plans": round(min(published)) if published else None,
    }
    if as_json:
        print_json(summary)
    else:
        print({key: value for key, value in summary.items() if key != "rows"})


if __name__ == "__main__":
    main()
