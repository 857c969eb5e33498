"""Speed of the vGPU simulator, and the figures of its study: `speed`, `claims` or `loads`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

import click

from simulator.cli import InputErrors, print_json
from simulator.vgpu.metrics import collect, over_seeds, summarise
from simulator.vgpu.scenario import Scenario, load_scenario
from simulator.vgpu.scenario_runs import run_all
from simulator.vgpu.simulation import simulate

ORIGIN_SCENARIOS = ("A1", "A2", "A2P", "A3", "A4", "A5")
RETRIED = {"scheduling.admission": "usage", "scheduling.retry_every_tick": True}
LOADS = (60, 160, 190, 220, 300)


def best_of(scenario: Scenario, use_numba: bool, times: int) -> float:
    """Return the CPU seconds of the fastest of several runs with different seeds, after a warm-up.

    A run is one thread that never waits, so on an idle machine its CPU time is the wall time.
    """
    simulate(scenario, 0, use_numba=use_numba, tasks=())
    seconds = []
    for seed in range(1, times + 1):
        began = time.process_time()
        simulate(scenario, seed, use_numba=use_numba)
        seconds.append(time.process_time() - began)
    return min(seconds)


def speed(seeds: int, jobs: int) -> None:
    """Print as JSON the seconds of a run of 32,000 ticks and 190 tasks, and of a sweep of A1 to A5."""
    found: dict[str, Any] = {}
    for name in ("A1", "A3"):
        for admission in ("quota", "usage"):
            scenario = load_scenario(name, {"tasks": 190, "scheduling.admission": admission})
            found[f"{name}_{admission}"] = {
                "plain_s": round(best_of(scenario, False, 3), 3),
                "compiled_s": round(best_of(scenario, True, 5), 3),
            }
    scenarios = {name: load_scenario(name) for name in ORIGIN_SCENARIOS}
    began = time.perf_counter()
    runs = sum(1 for _ in run_all(scenarios, range(1, seeds + 1), jobs=jobs))
    wall_s = time.perf_counter() - began
    found["sweep"] = {"runs": runs, "processes": jobs, "wall_s": round(wall_s, 1)}
    print_json(found)


def figures(name: str, seeds: Sequence[int], jobs: int, **changes: Any) -> dict[str, Any]:
    """Return the collected figures of one scenario at 320 s and `poisson_burst`."""
    scenario = load_scenario(name, {"duration_s": 320, "arrival": "poisson_burst", "tasks": 160, **changes})
    return collect([summarise(each.run) for _, each in run_all({name: scenario}, seeds, jobs=jobs)])


def claims(seeds: int, jobs: int) -> None:
    """Print the share of started tasks with IR above 1.25 for each claim's switch alone, at 160 tasks."""
    all_of_them, two = ("A1", "A3", "A4", "A5"), ("A1", "A3")
    cases: list[tuple[str, dict[str, Any], Sequence[str]]] = [
        ("quota", {}, all_of_them),
        ("usage", {"scheduling.admission": "usage"}, two),
        ("usage, retried every tick", RETRIED, two),
        ("max", {"scheduling.admission": "max"}, two),
        ("light first", {"arbitration": "light_first"}, two),
        ("bottleneck", {"progress": "bottleneck"}, all_of_them),
        ("no vendor fallback", {"scheduling.vendor_fallback": False}, two),
        ("memory gate off", {"sandbox.memory_gate": False}, ("A3",)),
        ("compute gate off", {"sandbox.compute_gate": False}, ("A3",)),
        ("compute gate off, bottleneck", {"sandbox.compute_gate": False, "progress": "bottleneck"}, ("A3",)),
        ("guard max_boost 1.4", {"guard.max_boost": 1.4}, ("A3",)),
    ]
    print(
        "| scenario | switch | IR > 1.25, mean [95 %] | lowest - highest | seeds with none | SLO | started |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, switch, changes in [(name, *case) for *case, names in cases for name in names]:
        got = figures(name, range(1, seeds + 1), jobs, **changes)
        shares = got["ir_over_1_25"]
        spread = over_seeds(shares)
        interval = "" if spread["low"] is None else f" [{spread['low']:.2%}, {spread['high']:.2%}]"
        print(
            f"| {name} | {switch} | {spread['mean']:.2%}{interval} |"
            f" {min(shares):.2%} - {max(shares):.2%} | {sum(share == 0 for share in shares)} of {seeds} |"
            f" {mean(got['slo_rate']):.1%} | {mean(got['started']):.0f} |",
            flush=True,
        )


def loads(seeds: int, jobs: int) -> None:
    """Print every scenario at each load, with the other settings of the claims."""
    print(
        "| tasks | scenario | started | SLO | dropped | IR mean | IR p95 | IR > 1.25 | compute used | cuts |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for tasks in LOADS:
        for name in ("A1", "A2", "A2-MIG", "A2P", "A3", "A4", "A5"):
            got = figures(name, range(1, seeds + 1), jobs, tasks=tasks)
            use = mean(dimensions["compute"] for dimensions in got["utilization"].values())
            cuts = sum(mean(counts) for counts in got["limiter_events"].values())
            print(
                f"| {tasks} | {name} | {mean(got['started']):.0f} | {mean(got['slo_rate']):.1%} |"
                f" {mean(got['drop_rate']):.1%} | {mean(got['ir_mean']):.3f} | {mean(got['ir_p95']):.3f} |"
                f" {mean(got['ir_over_1_25']):.2%} | {use:.1%} | {cuts:,.0f} |",
                flush=True,
            )


PARTS = {"speed": speed, "claims": claims, "loads": loads}


@click.command(cls=InputErrors, help=__doc__)
@click.argument("part", type=click.Choice(list(PARTS)))
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="Seeds 1 to this one.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes.")
def main(part: str, seeds: int, jobs: int) -> None:
    PARTS[part](seeds, jobs)


if __name__ == "__main__":
    main()
