"""`gpu-simulate shares`: divide a fleet of several GPU types among jobs and teams."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from resource_manager.cli.base import Command
from simulator.cli import options_as, print_json, reject_given
from simulator.errors import InputError, SimulationError
from simulator.present.tables import print_tables
from simulator.rounds.linear_programs import SOLVERS
from simulator.shares.division import Options, divide_fleet
from simulator.shares.filling import POLICIES
from simulator.shares.instance import read_instance
from simulator.shares.report import as_values, sentence, tables

POLICY_HELP = "max_min: among all jobs, by weight; two_level: among teams, then among the jobs of each."
PARTS_HELP = "max_min: K parts, each by itself, with every K-th job and a K-th of the GPUs."
SETTLE_HELP = "filled: raise levels until no job can gain; at_once: as a published figure was computed."


@click.command("shares", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@options_as(
    "options",
    Options,
    click.option("--policy", type=click.Choice(list(POLICIES)), required=True, help=POLICY_HELP),
    click.option("--pack", is_flag=True, help="Let two jobs share GPUs where their throughputs are known."),
    click.option("--agnostic", is_flag=True, help="Divide GPUs by number, whatever their type."),
    click.option("--parts", type=click.IntRange(min=1), default=1, metavar="K", help=PARTS_HELP),
    click.option("--settle", type=click.Choice(["filled", "at_once"]), default="filled", help=SETTLE_HELP),
    click.option("--solver", type=click.Choice(list(SOLVERS)), default="highs", help="Solver of at_once."),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
def command(file: Path, options: Options, as_json: bool) -> None:
    """Divide the fleet of FILE among its jobs: GPUs of each type, on average over time."""
    if options.settle != "at_once":
        reject_given(("solver",), "applies only to --settle at_once")
    began = time.perf_counter()
    instance = read_instance(file)
    try:
        division = divide_fleet(instance, options)
    except SimulationError as error:
        raise InputError(str(error), path=file) from error
    wall_s = time.perf_counter() - began
    if as_json:
        head = {"policy": options.policy, "jobs": len(instance.jobs), "parts": options.parts}
        print_json(head | as_values(instance, division) | {"wall_s": round(wall_s, 4)})
        return
    beside = None
    if not options.agnostic:
        beside = divide_fleet(instance, replace(options, agnostic=True, pack=False))
    click.echo(sentence(instance, division, beside))
    print_tables(*tables(instance, division, beside))
