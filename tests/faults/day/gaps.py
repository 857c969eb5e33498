"""What the day shows of waiting: GPUs that idled while somebody waited for them, and estimates that held."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from resource_manager.core.changes import (
    AgentSeen,
    Expired,
    GpuCleaned,
    GpuOpened,
    MembersReleased,
    Released,
    Resumed,
)
from tests.faults.day.proof import Evidence, Look, Span
from tests.faults.day.replayed import NO_REASON, Wait, reasons

GAP_S = 3.0
"""Longest time for which free GPUs may wait for the grant that they get next, on a busy machine, too."""

CLEANED = "the GPU was being cleaned"


@dataclass(frozen=True, slots=True)
class Gap:
    """Time for which all GPUs of a grant were free, and its request waited."""

    name: str
    node: str
    begin: float
    end: float
    why: str
    """What explains it, empty if nothing does."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def gaps(found: Evidence, held: Sequence[Span]) -> list[Gap]:
    """Return the gap before each grant; those without the name of a job that was drawn do not count."""
    of_lease: dict[int, list[Span]] = defaultdict(list)
    for span in held:
        of_lease[span.token].append(span)
    ends: dict[tuple[str, int], float] = {}
    ran_until: dict[str, float] = {}  # a preempted job waits again at its old place, but not since then
    looks: dict[tuple[str, int], list[Look]] = defaultdict(list)
    for look in found.looks:
        looks[look.name, look.sequence].append(look)
    # A GPU that is closed, as each is after a restore until its server was searched, is not free.
    openings = [
        (change.at, change.node, change.gpu_id if isinstance(change, GpuOpened) else None)
        for change in found.changes
        if isinstance(change, Resumed | GpuOpened | AgentSeen)
    ]
    # A lease that a restore brings back holds its GPUs until it ends a second time.
    again = {
        change.fencing_token: change.at
        for change in found.changes
        if isinstance(change, Released | Expired | MembersReleased) and change.at > found.lost[1]
    }
    openings += [
        (again[span.token], span.node, gpu)
        for span in held
        if span.end <= found.lost[1] and span.token in again
        for gpu in span.gpu_ids
    ]
    closed, reopened = {*found.window[0]}, found.window[2]
    cleaned: dict[tuple[str, int], list[float]] = defaultdict(list)
    for change in found.changes:
        if isinstance(change, GpuCleaned):
            cleaned[change.node, change.gpu_id].append(change.at)
    shown = []
    waits: dict[Gap, Wait] = {}
    """Of gaps that nothing seen explains, but for those after a restore, whose state is in no change."""
    for members in of_lease.values():
        first = members[0]
        places = [(span.node, gpu) for span in members for gpu in span.gpu_ids]
        free = [ends.get(place, 0.0) for place in places]
        free += [at for at, *opened in openings if at <= first.begin and _is_of(opened, places)]
        if closed & {span.node for span in members} and reopened <= first.begin:  # by maintenance
            free.append(reopened)
        begin = max(first.queued_at, ran_until.get(first.name, 0.0), *free)
        if begin < first.begin:
            seen = [look for look in looks[first.name, first.sequence] if begin <= look.at <= first.begin]
            past = (at for place in places for at in cleaned[place] if begin < at <= first.begin)
            clean_at = max(past, default=begin)
            why = _why(found, begin, first.begin, seen)
            if not why and clean_at > begin and first.begin - clean_at <= GAP_S:
                why = CLEANED
            gap = Gap(first.name, first.node, begin, first.begin, why)
            shown.append(gap)
            if unexplained([gap]) and first.begin <= (found.lost[1] or math.inf):
                waits[gap] = gap.name, clean_at, gap.end
        ran_until[first.name] = max(span.end for span in members)
        for span in members:
            ends |= {(span.node, gpu): span.end for gpu in span.gpu_ids}
    for gap, (why, without_s) in reasons(found.changes, waits).items():
        if without_s <= GAP_S:
            shown[shown.index(gap)] = replace(gap, why=why)
    return shown


def _is_of(opened: Sequence[Any], places: Iterable[tuple[str, int]]) -> bool:
    """Return whether the server or GPU that was opened has one of these GPUs."""
    node, gpu_id = opened
    return any(node == name and gpu_id in (None, number) for name, number in places)


def unexplained(shown: Iterable[Gap]) -> list[Gap]:
    """Return the gaps that are too long and that nothing explains, the longest first."""
    return sorted((gap for gap in shown if gap.seconds > GAP_S and not gap.why), key=lambda gap: -gap.seconds)


def _why(found: Evidence, begin: float, end: float, looks: Sequence[Look]) -> str:
    """Return what explains a gap; the reasons that were seen must do so for all of it but `GAP_S`."""
    paused_s = sum(max(min(end, until) - max(begin, at), 0.0) for at, until in found.pauses)
    if end - begin - paused_s <= GAP_S and paused_s:
        return "nothing was granted: recovery or upgrade"
    last = max((look.at for look in looks if look.kind not in NO_REASON), default=-math.inf)
    if end - last <= GAP_S:
        return next(look.kind for look in reversed(looks) if look.at == last)
    return ""


def estimates(found: Evidence, held: Iterable[Span]) -> tuple[int, int, int]:
    """Return how many first estimates with bounds there were, how many held, and how many began later.

    A job that was preempted, or gave its lease back, waits again under its number: each wait has an
    estimate of its own, which is of the start that ended it.
    """
    begins: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in held:
        begins[span.name, span.sequence].append(span.begin)
    first: dict[tuple[str, int, float], Look] = {}
    for look in found.looks:
        if look.earliest is not None or look.latest is not None:
            key = look.name, look.sequence
            if later := [begin for begin in begins[key] if begin >= look.at]:
                first.setdefault((*key, min(later)), look)
    starts = [(look, began) for (_, _, began), look in first.items()]
    late = sum(look.latest is not None and at > look.latest for look, at in starts)
    early = sum(look.earliest is not None and at < look.earliest for look, at in starts)
    return len(starts), len(starts) - late - early, late


def start_delays(found: Evidence, held: Iterable[Span]) -> dict[str, list[float]]:
    """Return for each way the seconds from a grant to the first line of its job in the ledger."""
    first: dict[str, float] = {}
    for beat in found.beats:
        token = beat["process"].split("-")[0]
        first.setdefault(token, beat["at"])
    ways = {job.name: job.way for job in found.jobs}
    delays: dict[str, list[float]] = defaultdict(list)
    for span in held:
        if span.rank == 0 and str(span.token) in first and span.name in ways:
            delays[ways[span.name]].append(first[str(span.token)] - span.begin)
    return delays
