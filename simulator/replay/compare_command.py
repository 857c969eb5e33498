"""`gpu-simulate compare`: policies and queue orders side by side on one workload."""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from resource_manager.cli.base import FILE, Command
from resource_manager.storage.history_file import write_file
from simulator import sweep
from simulator.cli import common_options, print_json, reject_given, seeds_of, seeds_option
from simulator.io.files import write_json, write_text
from simulator.present.tables import print_tables
from simulator.progress import progress_bar
from simulator.replay import comparison, options
from simulator.replay.comparison import Source
from simulator.replay.history import STORE_SCHEMES, read_history
from simulator.replay.report import page_of, table_of, team_table
from simulator.replay.verdict import by_team, cautions, findings, rows, verdict
from simulator.rounds.policies import is_round_policy


def parse_names(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str] | None:
    """Return the names of a comma-separated list; None where none was given."""
    if value is None:
        return None
    names = list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not names:
        raise click.BadParameter("lists no name")
    return names


@click.command("compare", cls=Command)
@options.workload_options(["openb", "csv", "json", "pollux", "shockwave"])
@click.option(
    "--policies",
    callback=parse_names,
    help="Placement and round policies; default first_fit,best_fit,fgd, or the study's.",
)
@click.option(
    "--orders",
    "--order",
    "orders",
    callback=parse_names,
    help="Queue orders, also with +backfill; default priority+backfill for --history, else fifo.",
)
@seeds_option
@click.option("--workers", type=click.IntRange(1), help="Processes; by default one per core.")
@click.option("--dask", help="Run on the Dask cluster at this address instead.")
@click.option("--report", type=FILE, help="Write one HTML page with everything.")
@common_options
def command(
    given: options.WorkloadOptions,
    policies: list[str] | None,
    orders: list[str] | None,
    seeds: list[int] | None,
    workers: int | None,
    dask: str | None,
    report: Path | None,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Run every policy under every order on one workload, in parallel, and report how they differ.

    With --output-dir an interrupted comparison can be resumed: finished runs are kept there.
    """
    if dask is not None:
        reject_given(("workers",), "sets the number of local processes; it cannot be used with --dask")
    policies = policies or list(options.default_policies(given.trace))
    orders = orders or [options.default_order(given.history)]
    options.reject_unused_options(given, policies, orders)
    if all(map(is_round_policy, policies)):
        why = f"has no effect with {', '.join(policies)}: round policies rank all jobs in every round"
        reject_given((*options.TEAM_OPTIONS, "orders"), why)
    with history_as_file(given.history) as recorded:
        source = options.source_of(replace(given, history=recorded))
        seeds = seeds_of(seeds, options.seed_of(source, seed))
        comparison.check(source, policies, orders, seeds, given.solver, given.teams)
        if not any(comparison.draws(source, policy) for policy in policies):
            reject_given(("seeds",), f"has no effect with {', '.join(policies)}: none of them draws")
        if output_dir is not None and recorded != given.history:
            source = copied(source, output_dir / "runs")
        rules = (given.quotas, given.solver, given.teams, given.checkpoint_s)
        cases = comparison.cases(source, policies, orders, seeds, *rules)
        executor = sweep.dask(dask) if dask else sweep.processes(min(workers or len(cases), len(cases)))
        with executor as pool, progress_bar("comparing") as progress:
            results = sweep.sweep(
                comparison.run_case,
                cases,
                pool,
                folder=None if output_dir is None else output_dir / "runs",
                progress=progress,
            )
    summary: dict[str, Any] = {
        "verdict": verdict(results),
        "cautions": cautions(results),
        "rows": rows(results),
        "findings": findings(results),
        "runs": [{**result["case"], **result["summary"]} for result in results],
    }
    title = f"Comparison on {source.name}"
    if output_dir is not None:
        write_json(output_dir / "summary.json", summary)
        report = report or output_dir / "report.html"
    if report is not None:
        write_text(report, page_of(title, results))
    if as_json:
        print_json(summary)
    else:
        for line in (*summary["verdict"], *summary["cautions"]):
            click.echo(line)
        print_tables(table_of(results))
        if teams_found := team_table(results):
            print_tables(teams_found)
        for line in by_team(results):
            click.echo(line)
        for line in summary["findings"]:
            click.echo(line)


@contextmanager
def history_as_file(history: str | None) -> Iterator[str | None]:
    """Yield the history as a file: a store may keep changing, and all runs must read the same history."""
    if history is None or not history.startswith(STORE_SCHEMES):
        yield history
        return
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        path = Path(folder) / "history.jsonl"
        write_file(read_history(history), path)
        yield str(path)


def copied(source: Source, folder: Path) -> Source:
    """Return the source of a copy of its one file in that folder, which processes elsewhere may read, too.

    An equal copy stays as it is, since kept runs know their files by the time of the last change.
    """
    path = folder / Path(source.paths[0]).name
    folder.mkdir(parents=True, exist_ok=True)
    if not (path.is_file() and filecmp.cmp(source.paths[0], path, shallow=False)):
        shutil.copyfile(source.paths[0], path)
    return replace(source, paths=(str(path),))
