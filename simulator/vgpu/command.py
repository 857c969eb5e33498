"""`gpu-simulate vgpu`: every scenario with every seed, summarised, reported and plotted."""

from __future__ import annotations

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
from simulator.progress import Progress, progress_bar
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
from simulator.vgpu.scenario_runs import TimedRun, run_all


@click.command("vgpu")
@click.option(
    "--scenarios",
    "--scenario",
    default="all",
    show_default=True,
    help="Names or TOML files, separated by commas, or all.",
)
@click.option("--tasks", "--num-tasks", "--num_tasks", type=click.IntRange(min=0), help="Tasks per run.")
@click.option(
    "--arrival", "--arrival-mode", "--arrival_mode", type=click.Choice(ARRIVALS), help="Arrival mode."
)
@click.option("--duration", "duration_s", type=float, help="Simulated seconds.")
@click.option("--delta-t", "--delta_t", "delta_t_s", type=float, help="Seconds per tick.")
@seeds_option
@click.option("--admission", type=click.Choice(ADMISSIONS), help="Amounts allocated to a running task.")
@click.option("--progress", type=click.Choice(PROGRESS), help="Measure of a task's progress.")
@click.option("--arbitration", type=click.Choice(ARBITRATIONS), help="Tasks granted first on a full node.")
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
    type=FiniteRange(min=0.001),
    default=0.1,
    show_default=True,
    help="Width of the buckets of the IR histogram.",
)
@common_options
def command(
    scenarios: str,
    seeds: list[int] | None,
    profiles: str | None,
    jobs: int,
    engine: str,
    hist_bucket: float,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Simulate a vGPU pool with API-sandbox gates.

    Without --tasks, --arrival and similar options each scenario uses its own values.
    """
    if output_dir is None:
        reject_given(("hist_bucket",), "is for the reports; give their folder with --output-dir")
    seeds = seeds_of(seeds, seed)
    chosen = read_scenarios(scenarios, changes)
    if profiles is not None:
        names = tuple(name.strip() for name in profiles.split(","))
        chosen = {name: without_profiles_except(each, names) for name, each in chosen.items()}
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    use_numba = {"auto": None, "plain": False, "numba": True}[engine]
    with progress_bar("runs") as progress:
        results = run_with_progress(chosen, seeds, jobs, use_numba, progress)
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
        print_table({name: collect(each) for name, each in summaries.items()}, len(seeds))


def read_scenarios(names: str, changes: dict[str, Any]) -> dict[str, Scenario]:
    """Load the scenarios by name, with the given options applied; raise `InputError`."""
    keys = {"admission": "scheduling.admission"}
    over = {keys.get(key, key): value for key, value in changes.items() if value is not None}
    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        wanted = scenario_names()
    chosen = [load_scenario(name, over) for name in wanted]
    by_name = {scenario.name: scenario for scenario in chosen}
    if len(by_name) < len(chosen):
        raise BadInput(f"--scenarios: {names} names a scenario twice; name each once")
    return by_name


def run_with_progress(
    scenarios: dict[str, Scenario], seeds: list[int], jobs: int, use_numba: bool | None, progress: Progress
) -> dict[str, list[TimedRun]]:
    """Run every scenario with every seed, in that order."""
    results: dict[str, list[TimedRun]] = {name: [] for name in scenarios}
    runs = run_all(scenarios, seeds, jobs=jobs, use_numba=use_numba)
    for done, (name, timed) in enumerate(runs, start=1):
        results[name].append(timed)
        progress(done, len(seeds) * len(scenarios))
    return results


def write_files(folder: Path, results: dict[str, list[TimedRun]], bucket: float) -> None:
    """Write reports, plots and the comparison page; note missing Chinese labels on standard error."""
    from simulator.vgpu.plots import NO_FONT, Labels
    from simulator.vgpu.scenario_report import write_reports

    if Labels.for_this_machine().font is None:
        click.echo(NO_FONT, err=True)
    written = write_reports(
        folder, {name: [each.run for each in runs] for name, runs in results.items()}, bucket
    )
    click.echo(f"wrote {len(written)} files to {folder}; start with comparison.html", err=True)


def print_table(collected: dict[str, dict[str, Any]], seeds: int) -> None:
    """Print one line per scenario; with several seeds means and 95 % confidence intervals."""
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
