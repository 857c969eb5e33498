"""Several algorithms on the same instances, and their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from simulator.oasis.baselines import Dorm, Drf, Fifo, Rrh
from simulator.oasis.model import Instance
from simulator.oasis.optimum import TIME_LIMIT_S, FixedPlan, Optimum, find_optimum
from simulator.oasis.planner import Oasis
from simulator.oasis.prices import OUTLIERS, Prices, fit_prices
from simulator.oasis.random_instances import draw_history
from simulator.oasis.simulation import InstanceRun, OnSlot, Scheduler, run


@dataclass(frozen=True, slots=True)
class OasisCase:
    """One instance to schedule: the seed of an algorithm's random draws, and the prices for OASiS."""

    seed: int
    instance: Instance
    prices: Prices


SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    "oasis": lambda ledger, case: Oasis(ledger, case.prices),
    "fifo": lambda ledger, case: Fifo(ledger, case.seed),
    "drf": lambda ledger, case: Drf(ledger),
    "rrh": lambda ledger, case: Rrh(ledger, case.seed),
    "dorm": lambda ledger, case: Dorm(ledger, case.instance),
}
"""Algorithm -> factory of its scheduler from an empty ledger and the `case`."""

ALGORITHMS = (*SCHEDULERS, "optimal")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs on one case by algorithm, and the optimum where it was requested."""

    case: OasisCase
    runs: dict[str, InstanceRun]
    optimum: Optimum | None


def compare(
    case: OasisCase,
    algorithms: Sequence[str],
    *,
    reoffer_after: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    on_slot: OnSlot | None = None,
) -> Comparison:
    """Return each algorithm's run; `on_slot` observes OASiS, `time_limit_s` limits the optimum."""
    runs: dict[str, InstanceRun] = {}
    optimum = None
    for name in algorithms:
        if name == "optimal":
            optimum = find_optimum(case.instance, time_limit_s)
            runs[name] = run(case.instance, partial(FixedPlan, plan=optimum.plan))
        else:
            runs[name] = run(
                case.instance,
                partial(SCHEDULERS[name], case=case),
                reoffer_after=reoffer_after if name == "oasis" else 0,
                on_slot=on_slot if name == "oasis" else None,
            )
    return Comparison(case, runs, optimum)


@dataclass(frozen=True, slots=True)
class Method:
    """Settings of a comparison: the algorithms, and the source of OASiS's prices."""

    algorithms: list[str]
    prices: Literal["estimated", "clairvoyant"]
    utility_floor: float
    eta: float | None
    misestimate: tuple[float, float]
    reoffer_after: int
    time_limit_s: float

    def fit(self, instance: Instance, seed: int) -> Prices:
        """Return the price functions for the instance."""
        if self.prices == "clairvoyant":
            fitted = fit_prices(instance.jobs, instance, self.utility_floor, self.eta, 0.0)
        else:
            history = draw_history(instance, seed)
            fitted = fit_prices(history, instance, self.utility_floor, self.eta, OUTLIERS)
        return fitted.scaled(*self.misestimate)

    def compare(self, instance: Instance, seed: int, on_slot: OnSlot | None = None) -> Comparison:
        """Return the comparison of every algorithm on the instance."""
        return compare(
            OasisCase(seed, instance, self.fit(instance, seed)),
            self.algorithms,
            reoffer_after=self.reoffer_after,
            time_limit_s=self.time_limit_s,
            on_slot=on_slot,
        )


def summarise(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the object that `--json` prints: figures by algorithm, one an instance, and their loads."""
    algorithms: dict[str, dict[str, Any]] = {}
    for name in comparisons[0].runs:
        mine = [comparison.runs[name] for comparison in comparisons]
        algorithms[name] = {
            "utility": [each.utility for each in mine],
            "accepted": [each.accepted for each in mine],
            "completed": [each.completed for each in mine],
        }
        if name != "optimal":
            decisions = [spent for each in mine for spent in each.decision_s]
            algorithms[name]["decision_ms_mean"] = 1000 * statistics.fmean(decisions) if decisions else 0.0
        if name == "oasis":
            algorithms[name]["alpha"] = [comparison.case.prices.alpha for comparison in comparisons]
    optima = [comparison.optimum for comparison in comparisons if comparison.optimum is not None]
    if optima:
        algorithms["optimal"] |= {
            "proven": [optimum.proven for optimum in optima],
            "gap": [optimum.gap for optimum in optima],
            "bound": [optimum.bound for optimum in optima],
            "seconds": [optimum.seconds for optimum in optima],
        }
        for name, figures in algorithms.items():
            if name != "optimal":
                figures["optimal_over_utility"] = [
                    ratio(optimum.utility, utility)
                    for optimum, utility in zip(optima, figures["utility"], strict=True)
                ]
    return {
        "algorithms": algorithms,
        "load": [comparison.case.instance.load() for comparison in comparisons],
        "seeds": [comparison.case.seed for comparison in comparisons],
        "jobs": [len(comparison.case.instance.jobs) for comparison in comparisons],
    }


def ratio(optimum: float, utility: float) -> float | None:
    """Return optimum / utility; None where the utility is 0 and the optimum is not."""
    if utility > 0:
        return optimum / utility
    return 1.0 if optimum == 0 else None
