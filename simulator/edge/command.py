"""`gpu-simulate edge`: plan a dataset with a policy, or score a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from resource_manager.cli.base import Command
from simulator.cli import common_options, print_json, reject_given
from simulator.edge.dataset import TIERS
from simulator.edge.dataset_files import read_dataset, write_dataset
from simulator.edge.environment import Environment
from simulator.edge.plan import read_plan, write_plan
from simulator.edge.random_dataset import generate
from simulator.edge.report import score_table, verdict_of, write_report
from simulator.edge.scorer import Score, score_plan
from simulator.edge.timetable import plan_timetable
from simulator.edge.water_gate import plan_water_gate
from simulator.io.files import write_json
from simulator.present.tables import print_tables
from simulator.progress import progress_bar

POLICIES: dict[str, Callable[..., Environment]] = {"timetable": plan_timetable, "water_gate": plan_water_gate}


@click.command("edge", cls=Command)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder with the nine tables of a dataset; default: generated from --seed.",
)
@click.option("--jobs", type=click.IntRange(1, 2000), default=40, help="Jobs of the generated dataset.")
@click.option(
    "--tiers", type=click.Choice(list(TIERS)), default="host+bs+ue", help="Devices that the plan may use."
)
@click.option("--policy", type=click.Choice(list(POLICIES)), default="timetable", help="Planning policy.")
@click.option(
    "--score-only",
    "plan_folder",
    metavar="PLAN",
    type=click.Path(path_type=Path),
    help="Score the plan in this folder instead of planning.",
)
@common_options
def command(
    data: Path | None,
    jobs: int,
    tiers: str,
    policy: str,
    plan_folder: Path | None,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Plan job graphs on cloud hosts, base stations and user devices, or score a plan."""
    if data is not None:
        reject_given(("jobs",), "is for a generated dataset; it cannot be used with --data")
        if plan_folder is not None or policy == "water_gate":
            reject_given(("seed",), "has no effect on a given dataset with --score-only or water_gate")
    if plan_folder is not None:
        reject_given(("tiers", "policy"), "is for planning; it cannot be used with --score-only")
    dataset = generate(seed, jobs=jobs) if data is None else read_dataset(data)
    began = time.perf_counter()
    if plan_folder is not None:
        plan, made_by = read_plan(plan_folder, dataset), str(plan_folder)
        used = {add.device.kind for step in plan.values() for add in step.adds}
        tiers = next(name for name, kinds in TIERS.items() if used <= set(kinds))
    else:
        with progress_bar(f"{policy} on {dataset.name}") as progress:
            plan = POLICIES[policy](dataset, TIERS[tiers], seed=seed, progress=progress).plan
        made_by = policy
    score = score_plan(dataset, plan)
    summary = summarise(score, time.perf_counter() - began)
    verdict = verdict_of(dataset, made_by, tiers, score)
    table = score_table(dataset, made_by, tiers, score)
    if output_dir is not None:
        if plan_folder is None:
            write_plan(plan, output_dir)
        if data is None:
            write_dataset(dataset, output_dir / dataset.name)
        write_json(output_dir / "summary.json", summary)
        write_report(dataset, score, verdict, table, output_dir)
    if as_json:
        print_json(summary)
    else:
        click.echo("\n".join(verdict))
        print_tables(table)


def summarise(score: Score, wall_s: float) -> dict[str, float]:
    return {
        "score": score.score,
        "task_rate": score.task_rate,
        "job_rate": score.job_rate,
        "mean_jct_s": score.mean_jct_s,
        "simulated_s": score.simulated_s,
        "wall_s": round(wall_s, 3),
        "failed_commands": sum(score.failed.values()),
    }
