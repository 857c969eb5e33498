"""What a comparison found: a row for each policy and order, a verdict to act on, cautions and findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from resource_manager.core.names import listed
from resource_manager.manager.plurals import counted
from resource_manager.scheduling.queue.orders import ORDERS
from simulator.present.units import duration, instead_of
from simulator.stats import is_above

BY_RUNTIME = [name for name, order in ORDERS.items() if order.uses_runtimes]
"""Queue orders that have nothing to go by where no request states its runtime."""

FEW_JOBS = 50
"""Below so many jobs, differences between runs are mostly chance."""

FEW_RUNTIMES = 0.5
"""Part of the jobs below which stated runtimes say little."""

NO_WAIT_S = 1.0
"""A job that starts within this time has not waited."""

SAME_WAIT = 0.02
"""Mean waits within this relative distance count as equal in a verdict."""

MAX_GROUPS = 4
"""Groups of jobs that a verdict names on either side."""

NOTICEABLE_POINTS = 2
"""Difference between two percentages that is worth a word."""

Row = dict[str, Any]

OF_TEAMS = " in the teams file"
PREEMPTION = f"preemption = true{OF_TEAMS}"
WEIGHTS = f"for each team weight = its quota{OF_TEAMS}"


def rows(results: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a row for each policy and order: the mean of every figure over its seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(result["case"]["name"], []).append(result)
    table = []
    for name, group in groups.items():
        row: Row = {"name": name, "runs": len(group)}
        for key, value in group[0]["summary"].items():
            values = [result["summary"][key] for result in group]
            if isinstance(value, int | float) and all(item is not None for item in values):
                row[key] = round(fmean(values), 3)
        table.append(row)
    return table


def distinct(table: Sequence[Row]) -> list[Row]:
    """Return each different row once, with the `names` of all that have its figures, and one for them."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in table:
        speed = ("name", "runs", "wall_s", "cpu_s", "pods_per_s")
        found.setdefault(tuple((k, v) for k, v in row.items() if k not in speed), []).append(row)
    table = []
    for alike in found.values():
        names = [row["name"] for row in alike]
        short = " = ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} equal ones"
        table.append({**alike[0], "name": short, "names": names})
    return table


def verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the comparison says, the sentence to act on first; `cautions` say how far to trust it."""
    live = [result for result in results if not result["case"].get("in_rounds")]
    lines = _live_verdict(live) if live else []
    return lines if len(live) == len(results) else [*lines, _rounds_verdict(results)]


def _live_verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    table = rows(results)
    if "pods" in table[0]:
        return _placing_verdict(results, table)
    first, different = table[0], distinct(table)
    if not first["jobs"]:
        return [f"There is no job in this {_workload(results)}, so there is nothing to compare."]
    if "mean_wait_s" not in first:
        why = "each request is too large for what is open, or over a limit of its team"
        return [f"No job starts under {first['name']}: {why}."]
    if len(table) == 1:
        used = first.get("allocated_percent")  # none without GPUs
        in_use = "" if used is None else f"; {used:.0f} % of the GPUs are in use over time"
        return [
            f"Under {first['name']}, jobs wait {duration(first['mean_wait_s'])} on average and "
            f"{duration(first['max_wait_s'])} at most{in_use}."
        ]
    if len(different) == 1:
        return [f"{_varied(results)} no difference on this {_workload(results)}: {_why_alike(results)}."]
    best = _best(results, table)
    wait, before = best["mean_wait_s"], first["mean_wait_s"]
    if best["started"] == first["started"]:
        if wait >= before * (1 - SAME_WAIT):
            return [
                f"Keep {first['name']}: nothing compared here makes jobs wait noticeably less than "
                f"{duration(before)} on average."
            ]
        if not is_above(_waits(results, first), _waits(results, best)):
            return [
                f"Keep {first['name']}: under {best['name']} jobs would wait {instead_of(wait, before)} on "
                "average, but the 95 % confidence intervals overlap: compare over more seeds."
            ]
    lines = [
        f"Change from {first['name']} to {best['name']}: on this {_workload(results)} jobs would wait "
        f"{instead_of(wait, before)} on average{_percent_less(wait, before)}, "
        f"{_longest(best, first)}."
    ]
    if equal := [
        row["name"]
        for row in different
        if row["runs"] > 1
        and row["name"] not in (best["name"], first["name"])
        and row["started"] == best["started"]
        and not is_above(_waits(results, row), _waits(results, best))
    ]:
        lines.append(f"{best['name']} is no better than {', '.join(equal)} beyond chance.")
    return [
        *_winners_and_losers(results, best["name"], first["name"]),
        *lines,
        f"To do so, set {_in_words(_changes(results, best['name']))}.",
    ]


def _winners_and_losers(results: Sequence[dict[str, Any]], name: str, first: str) -> list[str]:
    """Return who would wait less and who longer under that run than under the first, by size and team.

    Over several seeds, a group is named if its confidence intervals do not overlap.
    """
    both = [_group_waits(results, each) for each in (name, first)]
    now, before = ({group: _mean(each) for group, each in waits.items()} for waits in both)
    changes = {group: now[group] - before[group] for group in now if group in before}
    found = []
    for words, sign in (("less", -1), ("longer", 1)):
        groups = [
            group
            for group, change in changes.items()
            if sign * change >= max(NO_WAIT_S, SAME_WAIT * before[group])
            and is_above(*([wait_s for _, wait_s in waits[group]] for waits in both[::sign]))
        ]
        groups.sort(key=lambda group: -abs(changes[group]))
        who = [f"{group} ({instead_of(now[group], before[group])})" for group in groups]
        found.append(f"{words}: {listed(who, MAX_GROUPS) or 'none'}")
    return [f"Under {name} these wait {'; these wait '.join(found)}."] if changes else []


def _group_waits(results: Sequence[dict[str, Any]], name: str) -> dict[str, list[tuple[float, float]]]:
    """Return jobs and their mean wait of each group, for each seed of a run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if result["case"]["name"] == name:
            for group, (jobs, wait_s) in result["summary"].get("waits_of", {}).items():
                found.setdefault(group, []).append((jobs, wait_s))
    return found


def _mean(seeds: Sequence[tuple[float, float]]) -> float:
    return sum(jobs * wait_s for jobs, wait_s in seeds) / sum(jobs for jobs, _ in seeds)


def cautions(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return one sentence for each reason why this workload can show little or nothing."""
    table = rows(results)
    if "pods" in table[0]:
        count, listed = table[0].get("never_fit", 0), table[0].get("never_fit_rows", 0)
        if not listed:
            return []
        return [
            f"Pods that fit no node even when it is empty: {listed:g} of the list, {count:g} of those that "
            "arrive. As published, they count as arrived and are never placed."
        ]
    first, found = table[0], []
    if not first["jobs"]:
        return []
    if first["jobs"] < FEW_JOBS:
        found.append(
            f"Only {counted(first['jobs'], 'job')}: with fewer than {FEW_JOBS}, a difference may be chance; "
            "compare over a longer time."
        )
    if _nobody_waits(table):
        found.append("No job waited for longer than 1 s: neither order nor policy can show what it is worth.")
    if not first.get("stated_runtimes", 1):
        found.append(
            f"No request states a runtime, so backfill, {' and '.join(BY_RUNTIME)} have nothing to work "
            "with: let tasks state expected_runtime and compare again."
        )
    elif first.get("stated_runtimes", first["jobs"]) < FEW_RUNTIMES * first["jobs"]:
        found.append(
            f"Only {first['stated_runtimes']:g} of {counted(first['jobs'], 'job')} "
            f"{'states' if first['stated_runtimes'] == 1 else 'state'} a runtime, so backfill, "
            f"{' and '.join(BY_RUNTIME)} decide on few of them."
        )
    if some := [f"{row['name']} ({row['preemptions']:g})" for row in table if row.get("preemptions")]:
        found.append(
            f"Jobs are preempted under {', '.join(some)}: compare the GPU time lost to restarts, too, not "
            "the waits alone."
        )
    left = [(row["name"], row["jobs"] - row["started"] - row.get("cancelled", 0)) for row in table]
    if some := [f"{name} ({jobs:g})" for name, jobs in left if jobs > 0]:
        found.append(
            f"Jobs do not start under {', '.join(some)}, and count in no wait: compare the jobs started, too."
        )
    if not first.get("known_runtimes", 1):
        found.append("No job ends in this record, so its GPUs never become free again.")
    return found


def findings(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return one sentence per policy or order that differs from the first, with the figure behind it."""
    table = distinct(rows(results))
    first, others = table[0], table[1:]
    if "pods" in first:
        return [_placing(row, first, results) for row in others]
    return [_waiting(row, first) for row in others]


def _placing_verdict(results: Sequence[dict[str, Any]], table: list[Row]) -> list[str]:
    first, different = table[0], distinct(table)
    best = max(different, key=lambda row: row["allocated_percent"])
    used = f"{best['allocated_percent']:.1f} % of the GPUs when 130 % of them have been requested"
    if len(different) == 1:
        alike = f"{_varied(results)} no difference on this {_workload(results)}: each"
        return [f"{first['name'] if len(table) == 1 else alike} uses {used}."]
    gain = best["allocated_percent"] - first["allocated_percent"]
    more = f", {gain:.1f} points more than {first['name']}" if gain >= 0.05 else ""
    return [f"The cluster is filled best by {best['name']}: {used}{more}."]


def _rounds_verdict(results: Sequence[dict[str, Any]]) -> str:
    table = [row for row in rows(results) if "mean_jct_s" in row]
    if not table:
        return "No job ends, so there is nothing to compare."
    best, *others = sorted(table, key=lambda row: row["mean_jct_s"])
    text = f"Jobs end soonest under {best['name']}: {duration(best['mean_jct_s'])} after arrival on average"
    if others:
        text += f", {duration(others[0]['mean_jct_s'])} under {others[0]['name']}"
    return f"{text}. Round policies preempt jobs every round, for which a manager has no setting."


def _varied(results: Sequence[dict[str, Any]]) -> str:
    varied = [
        key
        for key in ("order", "policy", "preemption")
        if len({result["case"].get(key) for result in results}) > 1
    ] or ["order", "policy"]
    return f"{' and '.join(varied).capitalize()} make{'' if len(varied) > 1 else 's'}"


def _workload(results: Sequence[dict[str, Any]]) -> str:
    return "history" if "recorded_mean_wait_s" in results[0]["summary"] else "workload"


def _why_alike(results: Sequence[dict[str, Any]]) -> str:
    table = rows(results)
    if _nobody_waits(table):
        return "no job had to wait for longer than a second, so none could start earlier"
    if not table[0].get("stated_runtimes", 1) and any(
        "backfill" in result["case"]["order"] for result in results
    ):
        return "no request states a runtime, so backfill had nothing to work with"
    return "every run starts the same jobs at the same times"


def _nobody_waits(table: Sequence[Row]) -> bool:
    return all(row.get("max_wait_s", 0.0) < NO_WAIT_S and row["started"] == row["jobs"] for row in table)


def _percent_less(now: float, before: float) -> str:
    return f" ({100 * (before - now) / before:.0f} % less)" if 0 < now < before else ""


def _best(results: Sequence[dict[str, Any]], table: Sequence[Row]) -> Row:
    """Return the row to change to: of those that wait about the least, the one closest to the first."""
    most = max(row["started"] for row in table)
    able = [row for row in table if row["started"] == most]
    least = min(row["mean_wait_s"] for row in able)
    near = [row for row in able if row["mean_wait_s"] <= least * (1 + SAME_WAIT)]
    return min(near, key=lambda row: len(_changes(results, row["name"])))


def _waits(results: Sequence[dict[str, Any]], row: Row) -> list[float]:
    """Return the mean wait of each seed of a run."""
    return [each["summary"]["mean_wait_s"] for each in results if each["case"]["name"] == row["name"]]


def _changes(results: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Return what makes a live manager, set as in the first run, work as in that one."""
    first, other = results[0]["case"], next(r["case"] for r in results if r["case"]["name"] == name)
    found = [f'{key} = "{other[key]}"' for key in ("policy", "order") if other[key] != first[key]]
    if other.get("quotas") and "fair_share" in other["order"] and "fair_share" not in first["order"]:
        found.append(WEIGHTS)
    return found if other.get("preemption") == first.get("preemption") else [*found, PREEMPTION]


def _in_words(changes: Sequence[str]) -> str:
    settings = " and ".join(change for change in changes if not change.endswith(OF_TEAMS))
    parts = [f"{settings} in [cluster] and apply it"] if settings else []
    return " and ".join([*parts, *(change for change in changes if change.endswith(OF_TEAMS))])


def by_team(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each run with preemption: what it changed, with a guarantee and without."""
    found = []
    for result in results:
        case = {**result["case"], "name": "", "preemption": False}
        before = next((other for other in results if {**other["case"], "name": ""} == case), None)
        if not result["case"].get("preemption") or before is None:
            continue
        waits = [
            f"{who} wait {instead_of(now, then)} on average"
            for who, has in (("teams with a guarantee", True), ("the others", False))
            if (now := _mean_wait(result, has)) is not None and (then := _mean_wait(before, has)) is not None
        ]
        count, lost_s = (result["summary"][key] for key in ("preemptions", "lost_gpu_s"))
        found.append(
            f"Preemption under {before['case']['policy']}, {before['case']['order']}: {', '.join(waits)}; "
            f"{count:,} preemptions, {duration(lost_s)} of one GPU done again."
        )
    return found


def _mean_wait(result: dict[str, Any], has_guarantee: bool) -> float | None:
    teams = [
        team
        for team in result["summary"]["teams"].values()
        if (team["guaranteed"] != "0") == has_guarantee and team["mean_wait_s"] is not None
    ]
    jobs = sum(team["started"] for team in teams)
    return sum(team["mean_wait_s"] * team["started"] for team in teams) / jobs if jobs else None


def _placing(row: Row, first: Row, results: Sequence[dict[str, Any]]) -> str:
    gain = row["allocated_percent"] - first["allocated_percent"]
    lost, lost_first = (round(_fragmented(results, each["names"]), 1) for each in (row, first))
    if abs(gain) < 0.005:
        return f"{row['name']} places as much as {first['name']}."
    much = (
        f"{row['name']} places {abs(gain):.1f} points {'more' if gain > 0 else 'less'} than {first['name']}"
    )
    if lost == lost_first:
        return f"{much}."
    fact = (
        f"when 90 % of the load has arrived, {lost:.1f} % of the GPU capacity that it leaves free is of no "
        f"use, {lost_first:.1f} % of that of {first['name']}"
    )
    return f"{much}, {'because' if (gain > 0) == (lost < lost_first) else 'although'} {fact}."


def _fragmented(results: Sequence[dict[str, Any]], names: Sequence[str]) -> float:
    """Return the fragmentation ratio at 90 % of arrived load, the mean over seeds."""
    return fmean(r["curve"]["frag_ratio_percent"][90] for r in results if r["case"]["name"] in names)


def _waiting(row: Row, first: Row) -> str:
    wait, wait_first = row.get("mean_wait_s"), first.get("mean_wait_s")
    if wait is None or wait_first is None:
        started, started_first = row["started"], first["started"]
        return (
            f"{row['name']} starts {started:g} of {counted(row['jobs'], 'job')}, "
            f"{first['name']} {started_first:g}."
        )
    if math.isclose(wait, wait_first, rel_tol=SAME_WAIT, abs_tol=1e-3):
        about = "" if math.isclose(wait, wait_first, rel_tol=1e-3, abs_tol=1e-3) else "about "
        names = f"{row['name']} as under {first['name']}"
        return f"Jobs wait {about}as long under {names}: {duration(wait)} on average."
    change = abs(wait - wait_first) / wait_first if wait_first else math.inf
    share = f"{100 * change:.0f} % " if change < 10 else ""
    return (
        f"Jobs wait {share}{'shorter' if wait < wait_first else 'longer'} under {row['name']} than under "
        f"{first['name']}: {instead_of(wait, wait_first)} on average, "
        f"{_beside(row, first)}."
    )


def _beside(row: Row, first: Row) -> str:
    """Return the first measure that differs, as a fact beside the wait: what causes what is not measured."""
    for key, words in (
        ("allocated_percent", "of the GPUs in use over time"),
        ("frag_ratio_percent", "of the free GPU capacity of no use"),
    ):
        share, share_first = row.get(key), first.get(key)
        if share is not None and share_first is not None and abs(share - share_first) >= NOTICEABLE_POINTS:
            return f"with {share:.1f} % {words} instead of {share_first:.1f} %"
    return _longest(row, first)


def _longest(row: Row, first: Row) -> str:
    wait, before = row["max_wait_s"], first["max_wait_s"]
    if (shown := duration(wait)) == duration(before):
        return f"and {shown} at most, as before"
    return f"and {instead_of(wait, before)} at most"
