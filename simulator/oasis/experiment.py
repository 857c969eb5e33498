"""Several algorithms on the same instances, and what they came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from simulator.oasis.baselines import Dorm, Drf, Fifo, Rrh
from simulator.oasis.ledger import Ledger
from simulator.oasis.model import Instance
from simulator.oasis.planner import Oasis
from simulator.oasis.prices import Prices
from simulator.oasis.simulation import OnSlot, Run, Scheduler, run


@dataclass(frozen=True, slots=True)
class Case:
    """One instance to be scheduled: the seed of whatever an algorithm draws, and the prices for OASiS."""

    seed: int
    instance: Instance
    prices: Prices


class MakeScheduler(Protocol):
    """Makes the scheduler of a case on an empty ledger."""

    def __call__(self, ledger: Ledger, case: Case) -> Scheduler: ...


SCHEDULERS: dict[str, MakeScheduler] = {
    "oasis": lambda ledger, case: Oasis(ledger, case.prices),
    "fifo": lambda ledger, case: Fifo(ledger, case.seed),
    "drf": lambda ledger, case: Drf(ledger),
    "rrh": lambda ledger, case: Rrh(ledger, case.seed),
    "dorm": lambda ledger, case: Dorm(ledger, case.instance),
}
"""Algorithm -> what makes its scheduler."""


def compare(
    case: Case, algorithms: Sequence[str], *, reoffer_after: int = 0, on_slot: OnSlot | None = None
) -> dict[str, Run]:
    """Each algorithm's run on the instance; `on_slot` watches OASiS."""
    runs = {}
    for name in algorithms:
        runs[name] = run(
            case.instance,
            partial(SCHEDULERS[name], case=case),
            reoffer_after=reoffer_after,
            on_slot=on_slot if name == "oasis" else None,
        )
    return runs


def summarise(cases: Sequence[Case], runs: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """The object that `--json` prints: figures by algorithm, one a case, and each case's load."""
    algorithms: dict[str, dict[str, Any]] = {}
    for name in runs[0]:
        mine = [by_name[name] for by_name in runs]
        decisions = [spent for each in mine for spent in each.decision_s]
        algorithms[name] = {
            "utility": [each.utility for each in mine],
            "accepted": [each.accepted for each in mine],
            "completed": [each.completed for each in mine],
            "decision_ms_mean": 1000 * statistics.fmean(decisions) if decisions else 0.0,
        }
        if name == "oasis":
            algorithms[name]["alpha"] = [case.prices.alpha for case in cases]
    return {
        "algorithms": algorithms,
        "load": [case.instance.load() for case in cases],
        "seeds": [case.seed for case in cases],
        "jobs": [len(case.instance.jobs) for case in cases],
    }
