"""`gpu-manager report`: GPU-hours, and what became of them."""

from __future__ import annotations

import csv
import io
from typing import Any

import click
from click.core import ParameterSource

from resource_manager.cli.base import BAD_INPUT, Failure, inert, print_json
from resource_manager.cli.lazy_tables import cluster_tables, tables
from resource_manager.cli.program import main, on_target, wide_option
from resource_manager.cli.target import Target


@main.command()
@click.option("--by", default="team", show_default=True, help="Keys: any of team,user,dag,gpu_type,source.")
@click.option("--since", default="30d", show_default=True, help="How far back: 45min, 12h, 30d.")
@click.option("--estimates", is_flag=True, help="Show how often estimated starts came true, instead.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV only.")
@wide_option
@on_target
def report(
    target: Target, by: str, since: str, estimates: bool, as_csv: bool, wide: bool, as_json: bool
) -> None:
    """Show the GPU-hours granted, what became of them, hours waited, and costs by the cluster's prices.

    granted = used + idle + failed + preempted + quarantined + unknown.
    """
    if as_csv and as_json:
        raise Failure("--csv and --json exclude each other", BAD_INPUT)
    if estimates:
        _print_estimates(target, wide=wide, as_json=as_json)
        return
    found = target.manager.report([by], since)
    if as_json:
        print_json(found)
    elif as_csv:
        _print_csv(found)
    else:
        tables.console(wide=wide).print(cluster_tables.report_table(found))


def _print_estimates(target: Target, *, wide: bool, as_json: bool) -> None:
    context = click.get_current_context()
    for name, option in (("by", "--by"), ("since", "--since"), ("as_csv", "--csv")):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise Failure(f"{option} and --estimates exclude each other", BAD_INPUT)
    found = target.manager.estimates()
    print_json(found) if as_json else tables.console(wide=wide).print(cluster_tables.estimates_table(found))


def _print_csv(report: Any) -> None:
    columns = [name for name in report["total"] if name != "group"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*report["by"], *columns])
    for row in report["rows"]:
        values = ("" if row[name] is None else row[name] for name in columns)
        writer.writerow([*map(inert, row["group"].values()), *values])
    click.echo(text.getvalue(), nl=False)
