"""`gpu-simulate vgpu`: scenarios times seeds, summarised, reported and plotted."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from simulator.cli import BadInput, common_options, print_json
from simulator.vgpu.metrics import collect, summarise
from simulator.vgpu.scenario import (
    ADMISSIONS,
    ARBITRATIONS,
    ARRIVALS,
    PROGRESS,
    Scenario,
    load_scenario,
    scenario_names,
    without_profiles_except,
)
from simulator.vgpu.sweep import Timed, run_all


@click.command("vgpu")
@click.option(
    "--scenarios",
    "--scenario",
    default="all",
    show_default=True,
    help="Names, TOML files, or all; separated by commas.",
)
@click.option("--tasks", "--num-tasks", "--num_tasks", type=click.IntRange(min=0), help="Tasks in a run.")
@click.option(
    "--arrival", "--arrival-mode", "--arrival_mode", type=click.Choice(ARRIVALS), help="How tasks arrive."
)
@click.option("--duration", "duration_s", type=float, help="Seconds simulated.")
@click.option("--delta-t", "--delta_t", "delta_t_s", type=float, help="Seconds a tick.")
@click.option("--seeds", help="Seeds such as 1-20 or 1,5,7-9; overrules --seed.")
@click.option("--admission", type=click.Choice(ADMISSIONS), help="What a node's ledger counts.")
@click.option("--progress", type=click.Choice(PROGRESS), help="What a task's progress follows.")
@click.option("--arbitration", type=click.Choice(ARBITRATIONS), help="Who is served first on a full node.")
@click.option("--profiles", help="Only these task profiles, separated by commas.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "plain", "numba"]),
    default="auto",
    show_default=True,
    help="Interpreted or compiled ticks; the results are the same.",
)
@click.option(
    "--hist-bucket",
    "--hist_bucket",
    type=click.FloatRange(min=0, min_open=True),
    default=0.1,
    show_default=True,
    help="Width of the buckets of the IR histogram.",
)
@common_options
def command(
    scenarios: str,
    seeds: str | None,
    profiles: str | None,
    jobs: int,
    engine: str,
    hist_bucket: float,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """A vGPU pool with API-sandbox gates.

    Without --tasks, --arrival and the like each scenario uses its own.
    """
    chosen = read_scenarios(scenarios, changes)
    if profiles is not None:
        names = tuple(name.strip() for name in profiles.split(","))
        chosen = {name: without_profiles_except(each, names) for name, each in chosen.items()}
    if seed < 0:
        raise BadInput(f"--seed: must be 0 or more, got {seed}")
    numbers = [seed] if seeds is None else read_seeds(seeds)
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    results = run_with_progress(chosen, numbers, jobs, {"auto": None, "plain": False, "numba": True}[engine])
    summaries = {name: [summarise(each.run) for each in runs] for name, runs in results.items()}
    if output_dir is not None:
        write_files(output_dir, results, hist_bucket)
    if as_json:
        print_json(
            {
                "scenarios": {
                    name: {**collect(summaries[name]), "wall_s": [round(each.wall_s, 4) for each in runs]}
                    for name, runs in results.items()
                }
            }
        )
    else:
        print_table({name: collect(each) for name, each in summaries.items()}, len(numbers))


def read_scenarios(names: str, changes: dict[str, Any]) -> dict[str, Scenario]:
    """The scenarios by name, with the options that were given laid over them; raises `InputError`."""
    keys = {"admission": "scheduling.admission"}
    over = {keys.get(key, key): value for key, value in changes.items() if value is not None}
    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        wanted = scenario_names()
    chosen = [load_scenario(name, over) for name in wanted]
    by_name = {scenario.name: scenario for scenario in chosen}
    if len(by_name) < len(chosen):
        raise BadInput(f"--scenarios: {names} names a scenario twice")
    return by_name


MOST_SEEDS = 100_000


def read_seeds(text: str) -> list[int]:
    """Numbers and ranges, in order and without repeats; raises `BadInput`."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        if match is None:
            raise BadInput(f"--seeds: {part!r} is neither a number nor a range such as 1-20")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise BadInput(f"--seeds: {part!r} ends before it begins")
        if len(seeds) + last - first >= MOST_SEEDS:
            raise BadInput(f"--seeds: {part!r} makes more than {MOST_SEEDS:,} seeds")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def run_with_progress(
    scenarios: dict[str, Scenario], seeds: list[int], jobs: int, use_numba: bool | None
) -> dict[str, list[Timed]]:
    """Runs everything, with a bar on standard error where that is a terminal."""
    results: dict[str, list[Timed]] = {name: [] for name in scenarios}
    runs = run_all(scenarios, seeds, jobs=jobs, use_numba=use_numba)
    bar: Any = nullcontext()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True), transient=True)
    with bar:
        row = (
            None if bar.__class__ is nullcontext else bar.add_task("runs", total=len(seeds) * len(scenarios))
        )
        for name, timed in runs:
            results[name].append(timed)
            if row is not None:
                bar.advance(row)
    return results


def write_files(folder: Path, results: dict[str, list[Timed]], bucket: float) -> None:
    """Reports, plots and the comparison page; says on standard error where Chinese labels are missing."""
    from simulator.vgpu.plots import NO_FONT, Labels
    from simulator.vgpu.report import write_reports

    if Labels.for_this_machine().font is None:
        click.echo(NO_FONT, err=True)
    written = write_reports(
        folder, {name: [each.run for each in runs] for name, runs in results.items()}, bucket
    )
    click.echo(f"wrote {len(written)} files to {folder}; begin with comparison.html", err=True)


def print_table(collected: dict[str, dict[str, Any]], seeds: int) -> None:
    """One line a scenario on standard output; with several seeds means and 95 % confidence intervals."""
    columns = {
        "started": ("started", "{:.0f}"),
        "SLO rate": ("slo_rate", "{:.1%}"),
        "drop rate": ("drop_rate", "{:.1%}"),
        "IR mean": ("ir_mean", "{:.3f}"),
        "IR p95": ("ir_p95", "{:.3f}"),
        "IR > 1.25": ("ir_over_1_25", "{:.2%}"),
        "limited tasks": ("limited_tasks", "{:.0f}"),
    }
    rows = [["scenario", *columns]]
    for name, figures in collected.items():
        cells = [name]
        for key, form in columns.values():
            spread = figures["confidence"][key]
            cell = "-" if spread["mean"] is None else form.format(spread["mean"])
            if spread["low"] is not None:
                cell += f" ± {form.format(spread['high'] - spread['mean'])}"
            cells.append(cell)
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if seeds > 1:
        click.echo(f"means over {seeds} seeds ± 95 % confidence")
