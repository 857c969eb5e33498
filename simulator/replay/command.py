"""`gpu-simulate replay`: a recorded workload under a placement policy and a queue order."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from simulator.cli import BadInput, common_options, print_json
from simulator.replay import muri, openb
from simulator.report import write_json, write_text


@click.command("replay")
@click.option("--trace", type=click.Choice(["openb", "muri"]), help="The kind of trace.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the trace.")
@click.option("--pods", default="default", show_default=True, help="openb: the pod list.")
@click.option("--jobs", "jobs", help="muri: the trace, such as trace1.")
@click.option("--order", default="srtf", show_default=True, help="Queue order.")
@click.option("--policy", default="first_fit", show_default=True, help="Placement policy.")
@click.option(
    "--curve", type=click.Path(dir_okay=False, path_type=Path), help="openb: write the curve as CSV."
)
@common_options
def command(
    trace: str | None,
    data: Path | None,
    pods: str,
    jobs: str | None,
    order: str,
    policy: str,
    curve: Path | None,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Replays a recorded workload through the resource manager's own allocator."""
    if data is None:
        raise BadInput("--data is missing: the folder of the trace")
    if trace == "muri":
        if jobs is None or order not in muri.ORDERS:
            raise BadInput(f"muri takes --jobs and --order, one of {', '.join(muri.ORDERS)}")
        with progress_bar("running jobs") as progress:
            report(muri.replay(muri.read_jobs(data, jobs), order, progress), as_json)
        return
    read = openb.read_trace(data, pods, seed)
    with progress_bar("placing pods") as progress:
        summary, rows = openb.replay(read, policy, seed, progress)
    if curve is not None:
        write_table(curve, openb.CURVE_COLUMNS, rows)
    if output_dir is not None:
        write_json(output_dir / "summary.json", summary)
        write_table(output_dir / "curve.csv", openb.CURVE_COLUMNS, rows)
    report(summary, as_json)


@contextmanager
def progress_bar(what: str) -> Iterator[openb.Progress]:
    """A bar with rate and time left on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:,.0f}/s" if speed else "")

        yield update


def write_table(path: Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Writes a CSV file, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, text.getvalue())


def report(summary: dict[str, Any], as_json: bool) -> None:
    """The summary as JSON, or as lines of name and value."""
    if as_json:
        print_json(summary)
        return
    width = max(map(len, summary))
    for name, value in summary.items():
        shown = f"{value:,}" if isinstance(value, int | float) else value
        click.echo(f"{name:<{width}}  {shown}")
