"""Options that `replay` and `compare` share: where the workload is, and how results are shown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from simulator.cli import BadInput
from simulator.replay.comparison import Source
from simulator.report import write_text

Progress = Callable[[int, int], None]


def workload_options(kinds: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options that name a workload."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--quotas", callback=_quotas, help="fair_share: shares by team, as a=0.5,b=0.25."),
            click.option("--history", help="A file of gpu-manager history --export, or redis://…"),
            click.option("--jobs", help="muri: the trace, such as trace1. csv, json: file of the jobs."),
            click.option("--nodes", type=click.Path(path_type=Path), help="csv, json: file of the servers."),
            click.option("--pods", default="default", show_default=True, help="openb: the pod list."),
            click.option("--data", type=click.Path(path_type=Path), help="openb, muri: folder of the trace."),
            click.option("--trace", type=click.Choice(kinds), help="The kind of trace."),
        ):
            function = option(function)
        return function

    return add


def _quotas(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[tuple[str, float], ...]:
    try:
        pairs = [part.split("=", 1) for part in (value or "").split(",") if part.strip()]
        shares = tuple((team.strip(), float(share)) for team, share in pairs)
        if not all(0 <= share <= 1 for _, share in shares):
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of shares from 0 to 1 such as a=0.5,b=0.25"
        ) from None
    return shares


def source_of(
    trace: str | None, data: Path | None, pods: str, nodes: Path | None, jobs: str | None, history: str | None
) -> Source:
    """The workload that the options name; raises `BadInput` that says which is missing or too much."""
    if (trace is None) == (history is None):
        raise BadInput("name one workload: --trace with its files, or --history")
    if history is not None:
        return Source("history", (history,))
    if trace == "openb":
        if data is None:
            raise BadInput("--trace openb needs --data, the folder with csv/ and fixtures/")
        return Source("openb", (str(data), pods))
    if nodes is None or jobs is None:
        raise BadInput(f"--trace {trace} needs --nodes and --jobs, the files of servers and jobs")
    for path in (nodes, Path(jobs)):
        if (path.suffix in (".json", ".jsonl")) != (trace == "json"):
            raise BadInput(f"--trace {trace} does not go with the file {path}")
    return Source("jobs", (str(nodes), jobs))


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
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
            bar.update(task, completed=done, total=total, rate=f"{speed:,.3g}/s" if speed else "")

        yield update


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a CSV file, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, text.getvalue())
