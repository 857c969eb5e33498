"""`gpu-simulate vgpu`: every scenario with every seed, summarised, reported and plotted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from resource_manager.cli.base import FILE, Command
from simulator import cli
from simulator.io.files import write_json
from simulator.present.tables import print_tables
from simulator.progress import progress_bar
from simulator.vgpu.metrics import collect, summarise
from simulator.vgpu.page import Collected, Swept, figures_table, sweep_tables, verdict
from simulator.vgpu.pool import Ledger
from simulator.vgpu.results import SandboxDecision, ScenarioRun
from simulator.vgpu.scenario import (
    ADMISSIONS,
    ARBITRATIONS,
    ARRIVALS,
    MAX_TASKS,
    MAX_TICKS,
    PROGRESS,
    Scenario,
    have_same_load,
    load_scenario,
    scenario_names,
    with_card_factor,
    without_profiles_except,
)
from simulator.vgpu.scenario_runs import TimedRun, run_all
from simulator.vgpu.simulation import simulate

KEYS = {
    "tasks": "tasks",
    "duration": "duration_s",
    "oversubscription": "scheduling.oversubscription",
    "limit_threshold": "sandbox.limit_threshold",
    "bandwidth_refill": "sandbox.bandwidth_refill",
    "compute_ceiling": "sandbox.compute_ceiling",
    "adjust_interval": "guard.adjust_interval_ticks",
    "boost_step": "guard.boost_step",
    "max_boost": "guard.max_boost",
    "decay": "guard.decay",
}
"""Axis of a sweep -> what it changes in a scenario; `card_factor` changes the cards' coefficients."""
WHOLE = {"tasks": click.IntRange(0, MAX_TASKS), "adjust_interval": click.IntRange(1, MAX_TICKS)}
AXES: dict[str, Any] = {axis: WHOLE.get(axis, cli.FiniteRange(min=0)) for axis in (*KEYS, "card_factor")}
ABOVE_0 = cli.FiniteRange(min=0, min_open=True)
PRINTED = (
    "started",
    "slo_rate",
    "slo_violations",
    "drop_rate",
    "drop_count",
    "ir_mean",
    "ir_p95",
    "ir_over_1_25",
    "limited_tasks",
)

Point = tuple[str, float, str]
"""Axis of a sweep (empty: none), its value, scenario."""


@click.command("vgpu", cls=Command)
@click.option(
    "--scenarios",
    "--scenario",
    default="all",
    help="Names or TOML files, separated by commas, or all.",
)
@click.option("--tasks", "--num-tasks", "--num_tasks", type=WHOLE["tasks"], help="Tasks per run.")
@click.option(
    "--arrival", "--arrival-mode", "--arrival_mode", type=click.Choice(ARRIVALS), help="Arrival mode."
)
@click.option("--duration", "duration_s", type=ABOVE_0, help="Simulated seconds.")
@click.option("--delta-t", "--delta_t", "delta_t_s", type=ABOVE_0, help="Seconds per tick.")
@cli.seeds_option
@click.option("--admission", type=click.Choice(ADMISSIONS), help="Amounts allocated to a running task.")
@click.option("--progress", type=click.Choice(PROGRESS), help="Measure of a task's progress.")
@click.option("--arbitration", type=click.Choice(ARBITRATIONS), help="Tasks granted first on a full node.")
@click.option("--profiles", help="Only these task profiles, separated by commas.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Processes.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "plain", "numba"]),
    default="auto",
    help="Interpreted or compiled ticks; the results are the same.",
)
@click.option(
    "--hist-bucket",
    "--hist_bucket",
    type=cli.FiniteRange(min=0.001),
    default=0.1,
    help="Width of the buckets of the IR histogram.",
)
@cli.sweep_option(AXES, "tasks:120,160,190")
@click.option("--trace", type=FILE, help="Write one run as JSON: its tasks, and pool and tasks over time.")
@click.option(
    "--trace-ticks", type=click.IntRange(min=1), default=100, help="Ticks between two samples of the trace."
)
@cli.common_options
def command(
    scenarios: str,
    seeds: list[int] | None,
    profiles: str | None,
    jobs: int,
    engine: str,
    hist_bucket: float,
    sweep: dict[str, list[float]],
    trace: Path | None,
    trace_ticks: int,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Simulate a vGPU pool with API-sandbox gates.

    Without --tasks, --arrival and similar options each scenario uses its own values.
    """
    if output_dir is None:
        cli.reject_given(("hist_bucket",), "is for the reports; give their folder with --output-dir")
    if trace is None:
        cli.reject_given(("trace_ticks",), "is for the trace; give its file with --trace")
    seeds = cli.seeds_of(seeds, seed)
    points = read_points(scenarios, profiles, changes, sweep)
    names = [name for axis, _, name in points if not axis]
    if trace is not None and (len(names) > 1 or len(seeds) > 1):
        raise cli.BadInput("--trace is for one run: give one scenario and one seed")
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    use_numba = engine == "numba" or (engine == "auto" and find_spec("numba") is not None)
    timed, collected = run_points(points, seeds, jobs, use_numba)
    by_name = {name: collected["", 0, name] for name in names}
    swept: Swept = {
        axis: {value: {name: collected[axis, value, name] for name in names} for value in values}
        for axis, values in sweep.items()
    }
    if trace is not None:
        write_trace(trace, points["", 0, names[0]], seeds[0], trace_ticks, use_numba)
    if output_dir is not None:
        write_files(
            output_dir, {name: [each.run for each in timed[name]] for name in names}, swept, hist_bucket
        )
    if as_json:
        cli.print_json(as_values(by_name, swept, timed))
        return
    same_load = have_same_load([points["", 0, name] for name in names])
    click.echo("\n".join(verdict(by_name, swept, same_load)))
    note = f"means over {len(seeds)} seeds ± 95 % confidence" if len(seeds) > 1 else ""
    print_tables(
        figures_table(by_name, PRINTED, note=note),
        *(table for axis, by_value in swept.items() for table in sweep_tables(by_value, axis=axis)),
    )


def run_points(
    points: Mapping[Point, Scenario], seeds: Sequence[int], jobs: int, use_numba: bool
) -> tuple[dict[str, list[TimedRun]], dict[Point, dict[str, Any]]]:
    """Return the runs of every scenario as it is, and the figures of every point, over the seeds."""
    runs: dict[str, list[TimedRun]] = {name: [] for axis, _, name in points if not axis}
    summaries: dict[Point, list[dict[str, Any]]] = {point: [] for point in points}
    with progress_bar("runs") as progress:
        results = run_all(points, seeds, jobs=jobs, use_numba=use_numba)
        for done, (point, timed) in enumerate(results, start=1):
            summaries[point].append(summarise(timed.run))
            if not point[0]:
                runs[point[2]].append(timed)
            progress(done, len(seeds) * len(points))
    return runs, {point: collect(each) for point, each in summaries.items()}


def as_values(by_name: Collected, swept: Swept, runs: Mapping[str, Sequence[TimedRun]]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    found: dict[str, Any] = {
        "scenarios": {
            name: {**each, "wall_s": [round(run.wall_s, 4) for run in runs[name]]}
            for name, each in by_name.items()
        }
    }
    if swept:
        found["sweeps"] = {
            axis: {f"{value:.15g}": {"scenarios": each} for value, each in by_value.items()}
            for axis, by_value in swept.items()
        }
    return found


def read_points(
    names: str, profiles: str | None, changes: Mapping[str, Any], sweep: Mapping[str, Sequence[float]]
) -> dict[Point, Scenario]:
    """Load the scenarios as asked and at every value of every sweep; raise `InputError`."""
    keys = {"admission": "scheduling.admission"}
    over = {keys.get(key, key): value for key, value in changes.items() if value is not None}
    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        wanted = scenario_names()
    points: dict[Point, Scenario] = {}
    for axis, value in [("", 0.0), *((axis, value) for axis, values in sweep.items() for value in values)]:
        varied = over | ({KEYS[axis]: value} if axis in KEYS else {})
        for each in wanted:
            scenario = load_scenario(each, varied)
            if axis == "card_factor":
                scenario = with_card_factor(scenario, value)
            if profiles is not None:
                chosen = tuple(name.strip() for name in profiles.split(","))
                scenario = without_profiles_except(scenario, chosen)
            if (axis, value, scenario.name) in points:
                raise cli.BadInput(f"--scenarios: {names} names a scenario twice; name each once")
            Ledger(scenario)  # refuses a profile that fits no node
            points[axis, value, scenario.name] = scenario
    return points


def write_trace(path: Path, scenario: Scenario, seed: int, every: int, use_numba: bool) -> None:
    """Run the scenario once more, observed, and write its trace."""
    from simulator.vgpu.scenario_report import trace

    decisions: list[SandboxDecision] = []
    observers = [decisions.append]
    run = simulate(scenario, seed, use_numba=use_numba, observers=observers, observe_every=every)
    write_json(path, trace(run, decisions, every))


def write_files(folder: Path, runs: Mapping[str, list[ScenarioRun]], swept: Swept, bucket: float) -> None:
    """Write reports, plots and the comparison page; note missing Chinese labels on standard error."""
    from simulator.vgpu.plots import NO_FONT, Labels
    from simulator.vgpu.scenario_report import write_reports

    labels = Labels.for_this_machine()
    if labels.font is None:
        click.echo(NO_FONT, err=True)
    written = write_reports(folder, runs, swept, bucket, labels)
    click.echo(f"wrote {len(written)} files to {folder}; start with comparison.html", err=True)
