"""`gpu-simulate oasis`: OASiS, its baselines and the offline optimum on random or given instances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click

from resource_manager.cli.base import FOLDER, Command
from simulator import cli
from simulator.io.files import write_json
from simulator.oasis.calibrate import calibrate
from simulator.oasis.experiment import ALGORITHMS, Comparison, Method, summarise
from simulator.oasis.instance_file import read_instance, write_instance
from simulator.oasis.model import MAX_COUNT, Instance
from simulator.oasis.optimum import TIME_LIMIT_S
from simulator.oasis.plots import PriceRecorder
from simulator.oasis.prices import ETA, UTILITY_FLOOR
from simulator.oasis.random_instances import InstanceShape, draw_training
from simulator.oasis.report import tables, verdict, write_report
from simulator.present.tables import print_tables
from simulator.progress import Progress, progress_bar

AXES: dict[str, click.ParamType[Any]] = {
    "jobs": click.IntRange(1, MAX_COUNT),
    "servers": click.IntRange(1, MAX_COUNT),
    "load": cli.FiniteRange(0, 100.0, min_open=True),
}
"""Axis of a sweep -> its values; other numbers of servers get the same jobs."""

ABOVE_0 = cli.FiniteRange(0, min_open=True)

PRICING = ("prices", "utility_floor", "eta", "training_runs", "misestimate", "reoffer_after")
"""Options that change how OASiS decides."""


def parse_algorithms(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Return the names of a comma-separated list of algorithms."""
    names = list(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in ALGORITHMS:
            raise click.BadParameter(f"unknown algorithm {name!r}; known are {', '.join(ALGORITHMS)}")
    return names


def parse_eta(ctx: click.Context, param: click.Parameter, value: str) -> float | None:
    """Return a number above 0, or None for the word `proof`."""
    if value == "proof":
        return None
    try:
        eta = float(value)
    except ValueError:
        eta = 0.0
    if not 0 < eta < math.inf:
        raise click.BadParameter(f"{value!r} is neither a finite number above 0 nor `proof`")
    return eta


@click.command("oasis", cls=Command)
@cli.options_as(
    "shape",
    InstanceShape,
    click.option("--jobs", type=AXES["jobs"], default=10, help="Jobs per instance."),
    click.option("--slots", type=click.IntRange(1, MAX_COUNT), default=30, help="Time slots."),
    click.option(
        "--servers",
        type=AXES["servers"],
        default=5,
        help="Number of worker servers, and of parameter servers.",
    ),
    click.option("--mixed", is_flag=True, help="Servers of several types instead of one."),
    click.option(
        "--load",
        type=AXES["load"],
        help="Scale the jobs until they request this fraction of all slots of the most demanded resource.",
    ),
)
@cli.seeds_option
@cli.options_as(
    "method",
    Method,
    click.option(
        "--algorithms",
        callback=parse_algorithms,
        default="oasis",
        help=f"Comma-separated, from {', '.join(ALGORITHMS)}.",
    ),
    click.option(
        "--prices",
        type=click.Choice(["estimated", "clairvoyant"]),
        default="estimated",
        help="Fit the prices on other jobs of the same distribution, or on the very jobs to come.",
    ),
    click.option(
        "--utility-floor",
        type=cli.FiniteRange(0, 1, min_open=True),
        default=UTILITY_FLOOR,
        help="The lowest price counts a job's latest finish as at least this fraction of its priority.",
    ),
    click.option(
        "--eta",
        callback=parse_eta,
        default=f"{ETA:g}",
        metavar="NUMBER|proof",
        help="Divides the lowest price; proof: the smallest value with a proven competitive ratio.",
    ),
    click.option(
        "--misestimate",
        type=(ABOVE_0, ABOVE_0),
        default=(1.0, 1.0),
        metavar="LOW HIGH",
        help="Multiply the lowest and the highest prices by these factors, as a wrong estimate would.",
    ),
    click.option(
        "--reoffer-after",
        type=click.IntRange(0),
        default=0,
        help="Offer a job that OASiS refused again every this many slots; 0: never.",
    ),
    click.option(
        "--time-limit-s",
        type=ABOVE_0,
        default=TIME_LIMIT_S,
        help="Time limit for the optimum of one instance; after it the optimum is reported as not proven.",
    ),
)
@click.option(
    "--calibrate",
    "training_runs",
    type=click.IntRange(1),
    help="First fit --utility-floor and --eta on this many other instances.",
)
@cli.sweep_option(AXES, "jobs:5,10,20")
@click.option(
    "--instance",
    "instance_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the instance from this JSON file instead of drawing it.",
)
@click.option("--save-instances", type=FOLDER, help="Write each instance into this folder as JSON.")
@cli.common_options
def command(
    shape: InstanceShape,
    method: Method,
    training_runs: int | None,
    sweep: dict[str, list[float]],
    instance_file: Path | None,
    save_instances: Path | None,
    seeds: list[int] | None,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Schedule training jobs online by resource prices; compare with baselines and the offline optimum."""
    reject_unused_options(method, training_runs, instance_file)
    seeds = cli.seeds_of(seeds, seed)
    if instance_file is not None:
        instances = dict.fromkeys(seeds, read_instance(instance_file))
    else:
        instances = {each: shape.draw(each) for each in seeds}
    fitted = None
    if training_runs is not None:
        with progress_bar("calibration") as progress:
            fitted = calibrate(draw_training(instances[seeds[0]], training_runs), progress)
        method = replace(method, utility_floor=fitted.utility_floor, eta=fitted.eta)
    points = [(axis, value) for axis, values in sweep.items() for value in values]
    rounds = [instances, *({each: shape.draw(each, *point) for each in seeds} for point in points)]
    watch = PriceRecorder(instances[seeds[0]], method.fit(instances[seeds[0]], seeds[0]))
    with progress_bar("instances") as progress:
        comparisons, *varied = compare_rounds(method, rounds, watch, progress)
    summary = summarise(comparisons)
    if sweep:
        summary["sweeps"] = {axis: {} for axis in sweep}
        for (axis, value), runs in zip(points, varied, strict=True):
            summary["sweeps"][axis][f"{value:.15g}"] = summarise(runs)
    if fitted is not None:
        summary["calibration"] = asdict(fitted) | {"trained_on": training_runs}
    if save_instances is not None:
        for each, instance in instances.items():
            write_instance(save_instances / f"instance-{each}.json", instance)
    if output_dir is not None:
        write_json(output_dir / "summary.json", summary)
        write_report(output_dir, summary, comparisons, watch if "oasis" in method.algorithms else None)
    if as_json:
        cli.print_json(summary)
    else:
        click.echo("\n".join(verdict(summary)))
        print_tables(*tables(summary))


def reject_unused_options(method: Method, training_runs: int | None, instance_file: Path | None) -> None:
    """Raise `BadInput` for an option that was given and has no effect beside the others."""
    if instance_file is not None:
        drawing = (*(field.name for field in fields(InstanceShape)), "sweep")
        cli.reject_given(drawing, "shapes drawn instances; it cannot be used with --instance")
    if "oasis" not in method.algorithms:
        cli.reject_given(PRICING, "applies only to OASiS; add oasis to --algorithms")
    if "optimal" not in method.algorithms:
        cli.reject_given(("time_limit_s",), "applies only to the optimum; add optimal to --algorithms")
    if training_runs is not None:
        cli.reject_given(("eta", "utility_floor"), "is fitted by --calibrate; use one of the two")
        if method.prices == "clairvoyant":
            raise cli.BadInput(
                "--calibrate fits estimated prices; it cannot be used with --prices clairvoyant"
            )


def compare_rounds(
    method: Method, rounds: Sequence[dict[int, Instance]], watch: PriceRecorder, progress: Progress
) -> list[list[Comparison]]:
    """Return every round's comparisons, by seed; `watch` records the prices of the first one."""
    found: list[list[Comparison]] = []
    done, total = 0, sum(map(len, rounds))
    for instances in rounds:
        found.append([])
        for seed, instance in instances.items():
            found[-1].append(method.compare(instance, seed, None if done else watch))
            done += 1
            progress(done, total)
    return found
