"""`gpu-simulate oasis`: OASiS, its baselines and the offline optimum on random or given instances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from simulator.cli import (
    BadInput,
    FiniteRange,
    common_options,
    print_json,
    reject_given,
    seeds_of,
    seeds_option,
)
from simulator.io.files import write_json
from simulator.oasis.calibrate import calibrate
from simulator.oasis.comparison_tables import print_tables
from simulator.oasis.experiment import ALGORITHMS, Comparison, Method, summarise
from simulator.oasis.instance_file import read_instance, write_instance
from simulator.oasis.model import MAX_COUNT, Instance
from simulator.oasis.optimum import TIME_LIMIT_S
from simulator.oasis.plots import PriceRecorder, plot_comparison, plot_sweep
from simulator.oasis.prices import ETA, UTILITY_FLOOR
from simulator.oasis.random_instances import draw_instance, draw_training, with_servers
from simulator.progress import Progress, progress_bar

MAX_LOAD = 100.0

DRAWING = ("jobs", "slots", "servers", "mixed", "load", "sweep")
"""Options that shape drawn instances."""

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


def parse_sweep(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the values by axis of each sweep, written as `jobs:5,10,20`."""
    sweeps: dict[str, list[float]] = {}
    for text in value:
        axis, _, listed = text.partition(":")
        try:
            values = [float(part) for part in listed.split(",")]
        except ValueError:
            values = []
        whole = axis == "load" or all(each.is_integer() for each in values)
        most = MAX_LOAD if axis == "load" else MAX_COUNT
        sensible = bool(values) and whole and all(0 < each <= most for each in values)
        if axis not in ("jobs", "servers", "load") or not sensible:
            raise click.BadParameter(
                f"{text!r} is not jobs:5,10,20, servers:2,5,10 or load:0.5,1,2 with values above 0"
                f" (loads up to {MAX_LOAD:g}, the others up to {MAX_COUNT:,})"
            )
        if axis in sweeps:
            raise click.BadParameter(f"{axis} is varied twice; give all its values together")
        sweeps[axis] = values
    return sweeps


@click.command("oasis")
@click.option(
    "--jobs", type=click.IntRange(1, MAX_COUNT), default=10, show_default=True, help="Jobs per instance."
)
@click.option("--slots", type=click.IntRange(1, MAX_COUNT), default=30, show_default=True, help="Time slots.")
@click.option(
    "--servers",
    type=click.IntRange(1, MAX_COUNT),
    default=5,
    show_default=True,
    help="Number of worker servers, and of parameter servers.",
)
@click.option("--mixed", is_flag=True, help="Servers of several types instead of one.")
@click.option(
    "--load",
    type=FiniteRange(0, MAX_LOAD, min_open=True),
    help="Scale the jobs until they request this fraction of all slots of the most demanded resource.",
)
@seeds_option
@click.option(
    "--algorithms",
    callback=parse_algorithms,
    default="oasis",
    show_default=True,
    help=f"Comma-separated, from {', '.join(ALGORITHMS)}.",
)
@click.option(
    "--prices",
    type=click.Choice(["estimated", "clairvoyant"]),
    default="estimated",
    show_default=True,
    help="Fit the prices on other jobs of the same distribution, or on the very jobs to come.",
)
@click.option(
    "--utility-floor",
    type=FiniteRange(0, 1, min_open=True),
    default=UTILITY_FLOOR,
    show_default=True,
    help="The lowest price counts a job's latest finish as at least this fraction of its priority.",
)
@click.option(
    "--eta",
    callback=parse_eta,
    default=f"{ETA:g}",
    show_default=True,
    metavar="NUMBER|proof",
    help="Divides the lowest price; proof: the smallest value with a proven competitive ratio.",
)
@click.option(
    "--calibrate",
    "training_runs",
    type=click.IntRange(1),
    help="First fit --utility-floor and --eta on this many other instances.",
)
@click.option(
    "--misestimate",
    type=(FiniteRange(0, min_open=True), FiniteRange(0, min_open=True)),
    default=(1.0, 1.0),
    show_default=True,
    metavar="LOW HIGH",
    help="Multiply the lowest and the highest prices by these factors, as a wrong estimate would.",
)
@click.option(
    "--reoffer-after",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Offer a job that OASiS refused again every this many slots; 0: never.",
)
@click.option(
    "--time-limit-s",
    type=FiniteRange(0, min_open=True),
    default=TIME_LIMIT_S,
    show_default=True,
    help="Time limit for the optimum of one instance; after it the optimum is reported as not proven.",
)
@click.option(
    "--sweep",
    callback=parse_sweep,
    multiple=True,
    metavar="AXIS:VALUES",
    help="Also vary jobs, servers (under the same jobs) or load, as jobs:5,10,20; may be repeated.",
)
@click.option(
    "--instance",
    "instance_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the instance from this JSON file instead of drawing it.",
)
@click.option(
    "--save-instances",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each instance into this folder as JSON.",
)
@common_options
def command(
    jobs: int,
    slots: int,
    servers: int,
    mixed: bool,
    load: float | None,
    seeds: list[int] | None,
    algorithms: list[str],
    prices: str,
    utility_floor: float,
    eta: float | None,
    instance_file: Path | None,
    save_instances: Path | None,
    training_runs: int | None,
    misestimate: tuple[float, float],
    reoffer_after: int,
    time_limit_s: float,
    sweep: dict[str, list[float]],
    seed: int,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Schedule training jobs online by resource prices; compare with baselines and the offline optimum."""
    if instance_file is not None:
        reject_given(DRAWING, "shapes drawn instances; it cannot be used with --instance")
    if "oasis" not in algorithms:
        reject_given(PRICING, "applies only to OASiS; add oasis to --algorithms")
    if "optimal" not in algorithms:
        reject_given(("time_limit_s",), "applies only to the optimum; add optimal to --algorithms")
    if training_runs is not None:
        reject_given(("eta", "utility_floor"), "is fitted by --calibrate; use one of the two")
        if prices == "clairvoyant":
            raise BadInput("--calibrate fits estimated prices; it cannot be used with --prices clairvoyant")
    seeds = seeds_of(seeds, seed)

    def draw(of_seed: int, **varied: float) -> Instance:
        count = int(varied.get("jobs", jobs))
        drawn = draw_instance(of_seed, count, slots, servers, load=varied.get("load", load), mixed=mixed)
        return with_servers(drawn, int(varied["servers"]), mixed) if "servers" in varied else drawn

    if instance_file is not None:
        instances = [read_instance(instance_file)] * len(seeds)
    else:
        instances = [draw(each) for each in seeds]
    clairvoyant = prices == "clairvoyant"
    method = Method(algorithms, clairvoyant, utility_floor, eta, misestimate, reoffer_after, time_limit_s)
    fitted = None
    if training_runs is not None:
        with progress_bar("calibration") as progress:
            fitted = calibrate(draw_training(instances[0], training_runs), progress)
        method = replace(method, utility_floor=fitted.utility_floor, eta=fitted.eta)
    points = [(axis, value) for axis, values in sweep.items() for value in values]
    rounds = [dict(zip(seeds, instances, strict=True))]
    rounds += ({each: draw(each, **{axis: value}) for each in seeds} for axis, value in points)
    watch = PriceRecorder(instances[0], method.prices(instances[0], seeds[0]))
    with progress_bar("instances") as progress:
        comparisons, *varied = compare_rounds(method, rounds, watch, progress)
    summary = summarise(comparisons)
    swept: dict[str, dict[str, Any]] = {axis: {} for axis in sweep}
    for (axis, value), runs in zip(points, varied, strict=True):
        swept[axis][f"{value:g}"] = summarise(runs)
    if swept:
        summary["sweeps"] = swept
    if fitted is not None:
        summary["calibration"] = asdict(fitted) | {"trained_on": training_runs}
    if save_instances is not None:
        for each, instance in rounds[0].items():
            write_instance(save_instances / f"instance-{each}.json", instance)
    if output_dir is not None:
        write_json(output_dir / "summary.json", summary)
        plot_comparison(output_dir, comparisons, watch if "oasis" in algorithms else None)
        for axis, by_value in swept.items():
            plot_sweep(output_dir / f"utility_by_{axis}.png", axis, by_value)
    if as_json:
        print_json(summary)
    else:
        print_tables(summary)


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
