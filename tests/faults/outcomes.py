"""Outcome of the seeds: one line for each, one JSON object for all."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from tests.faults.setups import SETTINGS


@dataclass
class Outcome:
    seed: int
    setting: str
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    granted: int = 0
    gangs: int = 0
    members_released: int = 0
    preemptions: int = 0
    victims: int = 0
    errors: int = 0
    cancelled: int = 0
    lost_leases: int = 0
    kept_by_older: int = 0
    complaints: list[str] = field(default_factory=list)


def report(outcome: Outcome) -> None:
    verdict = "ok" if not outcome.complaints else f"BROKEN: {outcome.complaints[0]}"
    print(
        f"seed {outcome.seed:4d}  {outcome.setting:10s}  {outcome.operations:5d} operations  "
        f"{outcome.granted:4d} grants  {outcome.gangs:3d} gangs  {outcome.preemptions:3d} preempted  "
        f"{outcome.errors:4d} errors  "
        f"{outcome.faults.total():2d} faults  {verdict}",
        flush=True,
    )
    for complaint in outcome.complaints[1:6]:
        print(f"           {complaint}")


def summarise(outcomes: list[Outcome]) -> int:
    """Prints one JSON object; 1 if a promise was broken."""
    faults: Counter[str] = sum((outcome.faults for outcome in outcomes), Counter())
    kinds: Counter[str] = sum((outcome.kinds for outcome in outcomes), Counter())
    broken = sum(bool(outcome.complaints) for outcome in outcomes)
    lossy = {name for name, setup in SETTINGS.items() if setup.may_lose}
    total: dict[str, object] = {
        "seeds": len(outcomes),
        "broken": broken,
        "settings": Counter(outcome.setting for outcome in outcomes),
        "operations": sum(outcome.operations for outcome in outcomes),
        "fewest_operations": min((outcome.operations for outcome in outcomes), default=0),
        "grants": sum(outcome.granted for outcome in outcomes),
        "gangs": sum(outcome.gangs for outcome in outcomes),
        "members_released": sum(outcome.members_released for outcome in outcomes),
        "preemptions": sum(outcome.preemptions for outcome in outcomes),
        "victims_queued_again": sum(outcome.victims for outcome in outcomes),
        "errors": sum(outcome.errors for outcome in outcomes),
        "cancelled": sum(outcome.cancelled for outcome in outcomes),
        "lost_by_redis": sum(outcome.lost_leases for outcome in outcomes if outcome.setting in lossy),
        "renewed_or_released_by_older": sum(outcome.kept_by_older for outcome in outcomes),
        "by_kind": dict(kinds.most_common()),
        "faults": faults.total(),
        "by_fault": dict(faults.most_common()),
        "seeds_by_fault": dict(
            Counter(fault for outcome in outcomes for fault in outcome.faults).most_common()
        ),
    }
    print(json.dumps(total, indent=2))
    return 1 if broken else 0
