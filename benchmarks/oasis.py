"""The figures of OASiS beside its targets: `quality`, `speed`, `optimum` or `misestimate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from statistics import fmean

from simulator.oasis.calibrate import Calibration, calibrate
from simulator.oasis.experiment import Case, Comparison, compare
from simulator.oasis.model import Instance
from simulator.oasis.optimum import Optimum, find_optimum
from simulator.oasis.prices import ETA, OUTLIERS, UTILITY_FLOOR, fit_prices
from simulator.oasis.workload import draw_history, draw_instance, draw_training

BASELINES = ("fifo", "drf", "rrh", "dorm")


def ten_jobs(seed: int, load: float = 1.0) -> Instance:
    """The instance of the quality targets: 10 jobs, 30 slots, 5 + 5 servers."""
    return draw_instance(seed, jobs=10, slots=30, servers=5, load=load)


def case(seed: int, instance: Instance, fitted: Calibration | None, low: float = 1, high: float = 1) -> Case:
    """Prices estimated from a history of other jobs, or with the parameters that were fitted."""
    floor, eta = (UTILITY_FLOOR, ETA) if fitted is None else (fitted.utility_floor, fitted.eta)
    prices = fit_prices(draw_history(instance, seed), instance, floor, eta, OUTLIERS)
    return Case(seed, instance, prices.scaled(low, high))


def utilities(
    seeds: Sequence[int], load: float, fitted: Calibration | None, names: Sequence[str]
) -> list[Comparison]:
    return [compare(case(seed, ten_jobs(seed, load), fitted), names) for seed in seeds]


def over(comparisons: Iterable[Comparison], name: str) -> float:
    """OASiS's mean utility over another's; not instance by instance, where FIFO may end with nothing."""
    runs = [comparison.runs for comparison in comparisons]
    return fmean(each["oasis"].utility for each in runs) / fmean(each[name].utility for each in runs)


def train(load: float, count: int) -> Calibration:
    """Fits on instances that no seed gives, at that load."""
    fitted = calibrate(draw_training(ten_jobs(1, load), count))
    print(
        f"calibrated at load {load:g} on {count} training instances: "
        f"utility floor {fitted.utility_floor:g}, eta {fitted.eta:.4g}"
    )
    return fitted


def quality(seeds: Sequence[int], training: int, time_limit_s: float) -> None:
    """Ratio to the optimum, and against the baselines, plain and calibrated."""
    optima = {seed: find_optimum(ten_jobs(seed), time_limit_s) for seed in seeds}
    print(describe(optima.values()))
    for load in (0.8, 1.0, 2.0):
        fitted = train(load, training)
        plain = utilities(seeds, load, None, ("oasis", *BASELINES))
        tuned = utilities(seeds, load, fitted, ("oasis",))
        for label, ours in (("estimated", plain), ("calibrated", tuned)):
            print(f"load {load:g}, {label} prices, mean utilities over {len(seeds)} seeds:")
            for name in BASELINES:
                mixed = [
                    Comparison(theirs.case, {**theirs.runs, "oasis": mine.runs["oasis"]}, None)
                    for theirs, mine in zip(plain, ours, strict=True)
                ]
                print(f"  OASiS / {name:5} {over(mixed, name):6.2f}")
            if load == 1.0:
                against_optimum(ours, optima)


def against_optimum(comparisons: Sequence[Comparison], optima: dict[int, Optimum]) -> None:
    proven, bounds, broken = [], [], 0
    for comparison in comparisons:
        optimum = optima[comparison.case.seed]
        utility = comparison.runs["oasis"].utility
        (proven if optimum.proven else bounds).append(optimum.bound / utility)
        alpha = comparison.case.prices.alpha
        broken += not utility <= optimum.utility * (1 + 1e-6) <= 2 * alpha * utility * (1 + 2e-6)
    mean = fmean([*proven, *bounds])
    print(
        f"  optimum / OASiS {mean:.3f} mean, {max([*proven, *bounds]):.2f} worst "
        f"({len(bounds)} with the bound of an unproven optimum); "
        f"outside [1, 2 alpha]: {broken} of {len(comparisons)}"
    )


def describe(optima: Iterable[Optimum]) -> str:
    found = list(optima)
    seconds = sorted(optimum.seconds for optimum in found)
    return (
        f"optimum of {len(found)} instances: proven {sum(optimum.proven for optimum in found)}, "
        f"median {seconds[len(seconds) // 2]:.1f} s, mean {fmean(seconds):.1f} s, worst {seconds[-1]:.1f} s, "
        f"largest gap {max(optimum.gap for optimum in found):.2%}"
    )


def speed(seeds: Sequence[int]) -> None:
    """One decision with 100 slots and 50 + 50 servers; processor time, so that a busy machine counts less."""
    for load in (0.5, 1.0, 2.0):
        means = []
        for seed in seeds:
            instance = draw_instance(seed, jobs=100, slots=100, servers=50, load=load)
            decisions = compare(case(seed, instance, None), ["oasis"]).runs["oasis"].decision_s
            means.append(1000 * fmean(decisions))
        print(
            f"decision, T = 100, 50 + 50 servers, 100 jobs, load {load:g}: "
            f"{fmean(means):.2f} ms mean over {len(seeds)} seeds, {max(means):.2f} ms the slowest seed's mean"
        )


def optimum(seeds: Sequence[int], time_limit_s: float) -> None:
    """The optimum of ten jobs over 50 slots, servers alike and mixed."""
    for mixed in (False, True):
        found = [
            find_optimum(draw_instance(s, 10, 50, 5, load=1.0, mixed=mixed), time_limit_s) for s in seeds
        ]
        print(f"T = 50, {'mixed' if mixed else 'homogeneous'}: {describe(found)}")


def misestimate(seeds: Sequence[int], training: int) -> None:
    """OASiS's utility when L or U are estimated at a half or at twice what they are."""
    for label, fitted in (("estimated", None), ("calibrated", train(1.0, training))):
        base = fmean(run.runs["oasis"].utility for run in utilities(seeds, 1.0, fitted, ["oasis"]))
        print(f"{label} prices: utility {base:.1f}, means over {len(seeds)} seeds")
        for low, high in ((0.5, 1), (2, 1), (1, 0.5), (1, 2), (0.5, 0.5), (2, 2)):
            found = fmean(
                compare(case(seed, ten_jobs(seed), fitted, low, high), ["oasis"]).runs["oasis"].utility
                for seed in seeds
            )
            print(f"  L x {low:g}, U x {high:g}: {found / base - 1:+.2%}")
    base = fmean(run.runs["oasis"].utility for run in utilities(seeds, 1.0, None, ["oasis"]))
    clairvoyant = fmean(
        compare(Case(seed, instance, fit_prices(instance.jobs, instance)), ["oasis"]).runs["oasis"].utility
        for seed in seeds
        for instance in [ten_jobs(seed)]
    )
    print(f"clairvoyant L and U: {clairvoyant / base - 1:+.2%} of the utility with estimated prices")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("quality", "speed", "optimum", "misestimate"))
    parser.add_argument("--seeds", type=int, default=20, help="seeds 1 to this one")
    parser.add_argument("--training", type=int, default=40, help="instances to calibrate on")
    parser.add_argument("--time-limit-s", type=float, default=120.0, help="for one optimum")
    given = parser.parse_args()
    seeds = range(1, given.seeds + 1)
    match given.part:
        case "quality":
            quality(seeds, given.training, given.time_limit_s)
        case "speed":
            speed(seeds)
        case "optimum":
            optimum(seeds, given.time_limit_s)
        case "misestimate":
            misestimate(seeds, given.training)


if __name__ == "__main__":
    main()
