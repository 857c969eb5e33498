"""Figures of OASiS for each of its targets, and the basis of the default price parameters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import click

from simulator.cli import FiniteRange, InputErrors, print_json
from simulator.oasis.baselines import Drf
from simulator.oasis.calibrate import calibrate
from simulator.oasis.experiment import Comparison, OasisCase, compare
from simulator.oasis.model import Instance
from simulator.oasis.optimum import Optimum, find_optimum
from simulator.oasis.prices import ETA, OUTLIERS, UTILITY_FLOOR, fit_prices
from simulator.oasis.random_instances import draw_history, draw_instance, draw_training
from simulator.oasis.simulation import run

Parameters = tuple[float, float | None]
"""Utility floor and eta; None for the eta of the proof."""

DEFAULT: Parameters = (UTILITY_FLOOR, ETA)
PROOF: Parameters = (UTILITY_FLOOR, None)

BASELINES = ("fifo", "drf", "rrh", "dorm")


def ten_jobs(seed: int, load: float = 1.0) -> Instance:
    """Return the instance of the quality targets: 10 jobs, 30 slots, 5 + 5 servers."""
    return draw_instance(seed, jobs=10, slots=30, servers=5, load=load)


def case(seed: int, instance: Instance, parameters: Parameters, low: float = 1, high: float = 1) -> OasisCase:
    """Return the instance with prices estimated from a history of other jobs."""
    prices = fit_prices(draw_history(instance, seed), instance, *parameters, OUTLIERS)
    return OasisCase(seed, instance, prices.scaled(low, high))


def utilities(
    seeds: Sequence[int], load: float, parameters: Parameters, names: Sequence[str]
) -> list[Comparison]:
    return [compare(case(seed, ten_jobs(seed, load), parameters), names) for seed in seeds]


def train(load: float, count: int) -> Parameters:
    """Calibrate utility floor and eta on training instances, which no seed generates, at this load."""
    fitted = calibrate(draw_training(ten_jobs(1, load), count))
    print(
        f"calibrated at load {load:g} on {count} training instances: "
        f"utility floor {fitted.utility_floor:g}, eta {fitted.eta:.4g}",
        flush=True,
    )
    return fitted.utility_floor, fitted.eta


def parameters(training: int) -> None:
    """Print the basis of the defaults: utility over DRF's on training instances, which no seed draws."""
    for load in (0.8, 1.0):
        drawn = draw_training(ten_jobs(1, load), training)
        drf = fmean(run(instance, Drf).utility for instance, _ in drawn)
        for outliers in (0.0, OUTLIERS):
            found = []
            for eta in (None, 2.0, 1.0, ETA, 0.25, 0.125):
                prices = [fit_prices(jobs, each, UTILITY_FLOOR, eta, outliers) for each, jobs in drawn]
                trained = [
                    OasisCase(0, each, fitted) for (each, _), fitted in zip(drawn, prices, strict=True)
                ]
                mean = fmean(compare(each, ["oasis"]).runs["oasis"].utility for each in trained)
                found.append(f"{'proof' if eta is None else f'{eta:g}'} {mean / drf:.3f}")
            print(f"load {load:g}, outliers {outliers:g}: eta {', '.join(found)}", flush=True)


def variants(load: float, training: int) -> dict[str, Parameters]:
    """Return the compared parameters by label."""
    found = {"estimated": DEFAULT, "estimated, the proof's eta": PROOF}
    return found | {"calibrated": train(load, training)} if training else found


def baselines(seeds: Sequence[int], training: int) -> None:
    """Print OASiS's utility relative to that of the baselines."""
    for load in (0.8, 1.0, 2.0):
        others = utilities(seeds, load, DEFAULT, BASELINES)
        theirs = {name: fmean(each.runs[name].utility for each in others) for name in BASELINES}
        for label, parameters in variants(load, training).items():
            mine = fmean(each.runs["oasis"].utility for each in utilities(seeds, load, parameters, ["oasis"]))
            ratios = ", ".join(f"{name} {mine / utility:.2f}" for name, utility in theirs.items())
            print(f"load {load:g}, {label}: utility over {ratios}; means of {len(seeds)} seeds", flush=True)


def ratio(seeds: Sequence[int], training: int, time_limit_s: float) -> None:
    """Print the optimum relative to OASiS's utility at load 1; its upper bound if it is not proven."""
    optima = find_optima({seed: ten_jobs(seed) for seed in seeds}, "T = 30, homogeneous", time_limit_s)
    for label, parameters in variants(1.0, training).items():
        comparisons = utilities(seeds, 1.0, parameters, ["oasis"])
        ratios = [optima[each.case.seed].bound / each.runs["oasis"].utility for each in comparisons]
        alphas = [each.case.prices.alpha for each in comparisons]
        broken = sum(not 1 - 1e-6 <= x <= 2 * alpha for x, alpha in zip(ratios, alphas, strict=True))
        print(
            f"load 1, {label}: optimum / OASiS {fmean(ratios):.3f} mean, {max(ratios):.2f} worst; "
            f"alpha {fmean(alphas):.1f}; outside [1, 2 alpha]: {broken} of {len(ratios)}",
            flush=True,
        )


def find_optima(instances: Mapping[int, Instance], label: str, time_limit_s: float) -> dict[int, Optimum]:
    """Return the optimum by seed; print how many are proven, and their processor time."""
    found: dict[int, Optimum] = {}
    spent: list[float] = []
    for seed, instance in instances.items():
        started = time.process_time()
        found[seed] = find_optimum(instance, time_limit_s)
        spent.append(time.process_time() - started)
        if not found[seed].proven:
            print(f"  {label}, seed {seed}: not proven, gap {found[seed].gap:.2%}", flush=True)
    proven = sum(optimum.proven for optimum in found.values())
    print(
        f"optimum, {label}: {proven} of {len(found)} proven within {time_limit_s:g} s of wall time; "
        f"processor time {median(spent):.1f} s median, {fmean(spent):.1f} s mean, {max(spent):.1f} s worst",
        flush=True,
    )
    return found


def speed(seeds: Sequence[int]) -> None:
    """Measure one decision with 100 slots and 50 + 50 servers, in processor time; print JSON."""
    found = {}
    for load in (0.5, 1.0, 2.0):
        means = []
        for seed in seeds:
            instance = draw_instance(seed, jobs=100, slots=100, servers=50, load=load)
            decisions = compare(case(seed, instance, DEFAULT), ["oasis"]).runs["oasis"].decision_s
            means.append(1000 * fmean(decisions))
        found[f"load_{load:g}"] = {"mean_ms": round(fmean(means), 2), "slowest_seed_ms": round(max(means), 2)}
    print_json({"seeds": len(seeds), **found})


def optimum(seeds: Sequence[int], time_limit_s: float) -> None:
    """Find the optimum of ten jobs over 50 slots, with homogeneous and mixed servers."""
    for label, mixed in (("homogeneous", False), ("mixed", True)):
        instances = {seed: draw_instance(seed, 10, 50, 5, load=1.0, mixed=mixed) for seed in seeds}
        find_optima(instances, f"T = 50, {label}", time_limit_s)


def misestimate(seeds: Sequence[int], training: int) -> None:
    """Print OASiS's utility if L or U are estimated at half or twice their value."""
    for label, parameters in variants(1.0, training).items():
        base = fmean(run.runs["oasis"].utility for run in utilities(seeds, 1.0, parameters, ["oasis"]))
        print(f"{label} prices: utility {base:.1f}, means over {len(seeds)} seeds")
        for low, high in ((0.5, 1), (2, 1), (1, 0.5), (1, 2), (0.5, 0.5), (2, 2)):
            found = fmean(
                compare(case(seed, ten_jobs(seed), parameters, low, high), ["oasis"]).runs["oasis"].utility
                for seed in seeds
            )
            print(f"  L x {low:g}, U x {high:g}: {found / base - 1:+.2%}")
    base = fmean(run.runs["oasis"].utility for run in utilities(seeds, 1.0, DEFAULT, ["oasis"]))
    clairvoyant = fmean(
        compare(OasisCase(seed, instance, fit_prices(instance.jobs, instance)), ["oasis"])
        .runs["oasis"]
        .utility
        for seed in seeds
        for instance in [ten_jobs(seed)]
    )
    print(f"clairvoyant L and U: {clairvoyant / base - 1:+.2%} of the utility with estimated prices")


PARTS = {
    "parameters": lambda seeds, training, time_limit_s: parameters(training),
    "baselines": lambda seeds, training, time_limit_s: baselines(seeds, training),
    "ratio": ratio,
    "speed": lambda seeds, training, time_limit_s: speed(seeds),
    "optimum": lambda seeds, training, time_limit_s: optimum(seeds, time_limit_s),
    "misestimate": lambda seeds, training, time_limit_s: misestimate(seeds, training),
}


@click.command(cls=InputErrors, help=__doc__)
@click.argument("part", type=click.Choice(list(PARTS)))
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="Seeds 1 to this one.")
@click.option(
    "--training",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Instances to calibrate on; 0 skips the calibration; the part parameters needs at least 1.",
)
@click.option(
    "--time-limit-s",
    type=FiniteRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="For one optimum.",
)
def main(part: str, seeds: int, training: int, time_limit_s: float) -> None:
    if part == "parameters" and not training:
        raise click.UsageError("parameters needs --training instances, 1 or more")
    PARTS[part](range(1, seeds + 1), training, time_limit_s)


if __name__ == "__main__":
    main()
