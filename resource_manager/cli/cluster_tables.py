"""Tables of teams, maintenance, Slurm jobs and reports."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from resource_manager.cli.fitted_table import Column, FittedTable
from resource_manager.cli.tables import Row
from resource_manager.manager.answer_words import duration
from resource_manager.manager.plurals import counted
from resource_manager.manager.server_views import most_wasted, wasted
from resource_manager.scheduling.accounting.gpu_hours import WASTED

REPORT_COLUMNS = {
    "used": 0,
    "idle": 1,
    "failed": 2,
    "preempted": 5,
    "quarantined": 6,
    "unknown": 3,
    "waited": 4,
}
"""Columns of a report after `granted`, and the order in which a narrow terminal gives them up."""


def teams_table(teams: Row) -> FittedTable:
    """Return a table of the teams, in GPUs; `-` where a rule is not set."""
    guaranteed = sum(team["guaranteed"] for team in teams["teams"] if team["parent"] is None)
    table = FittedTable(
        Column("team"),
        Column("parent", 1),
        Column("guaranteed", justify="right"),
        Column("limit", justify="right"),
        Column("weight", 2, justify="right"),
        Column("allocated", justify="right"),
        Column("borrowed", 3, justify="right"),
        Column("waiting", justify="right"),
        title=f"{counted(len(teams['teams']), 'team')}, "
        f"{guaranteed:g} of {counted(teams['capacity'], 'GPU')} guaranteed, "
        f"preemption {'on' if teams['preemption'] else 'off'}",
    )
    for team in teams["teams"]:
        typed = ", ".join(f"{amount:g} {name}" for name, amount in team["guaranteed_by_type"].items())
        table.add_row(
            team["team"] or "(all others)",
            team["parent"] or "-",
            typed or f"{team['guaranteed']:g}",
            "-" if team["limit"] is None else f"{team['limit']:g}",
            f"{team['weight']:g}",
            f"{team['allocated']:g}",
            f"{team['borrowed']:g}",
            f"{team['waiting']} ({counted(team['waiting_gpus'], 'GPU')})" if team["waiting"] else "0",
        )
    return table


def maintenance_table(windows: Sequence[Row]) -> FittedTable:
    """Return the maintenance windows in the order given."""
    table = FittedTable(
        Column("#", justify="right"),
        Column("servers", wraps=True),
        Column("from"),
        Column("until"),
        Column("reason", 2, wraps=True),
        Column("leases", 1, justify="right"),
        title=counted(len(windows), "maintenance window"),
    )
    for window in windows:
        marks = ["open"] if window["is_open"] else []
        marks += [f"every {window['every']}"] if window["every"] else []
        marks += ["preempts"] if window["preempt"] else []
        table.add_row(
            str(window["id"]),
            ", ".join(window["servers"]),
            window["from"] + (f"\n({', '.join(marks)})" if marks else ""),
            window["until"],
            window["reason"],
            str(len(window["running"])),
        )
    return table


def slurm_table(jobs: Sequence[Row], now: float) -> FittedTable:
    """Return the jobs on Slurm, with Slurm's state, and where they run or why they wait."""
    table = FittedTable(
        Column("task", wraps=True),
        Column("job"),
        Column("state"),
        Column("GPUs", justify="right"),
        Column("where, or why it waits", wraps=True),
        Column("owner", 2),
        Column("team", 1),
        Column("age", justify="right"),
        title=f"{counted(len(jobs), 'job')} on Slurm",
    )
    for job in jobs:
        age = "" if job["submitted_at"] is None else duration(now - job["submitted_at"])
        gpus = str(job["gpus"] * job["nodes"])
        where = job["where"] or job["wait"]
        table.add_row(job["task_id"], job["id"], job["state"], gpus, where, job["owner"], job["team"], age)
    return table


def estimates_table(view: Row) -> Group:
    """Return how often estimated starts came true, in a sentence and by how far they looked ahead."""
    table = FittedTable(
        Column("start"),
        Column("estimates", justify="right"),
        Column("inside", justify="right"),
        Column("median error", justify="right"),
        Column("confidence"),
        title="Estimated starts",
    )
    for row in view["kinds"]:
        inside, error = row["inside_percent"], row["median_error_s"]
        table.add_row(
            row["kind"],
            str(row["estimates"]),
            "-" if inside is None else f"{inside:.0f} %",
            "-" if error is None else duration(error),
            row["confidence"],
        )
    if not view["kinds"]:
        return Group(Text("No request has started yet that waited and was given an estimate."))
    return Group(table, Text("Eight of ten should be inside of their interval.", "dim"))


def report_table(report: Row) -> Group:
    """Return the GPU-hours by group, their sum, and who wasted most; columns without a value are left out."""
    total = report["total"]
    since, until = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(report[key])) for key in ("since", "until")
    )
    title = f"GPU-hours from {since} to {until}"
    if report["history_since"] is not None and report["history_since"] > report["since"]:
        kept = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["history_since"]))
        title += f"\nThe history goes back to {kept}: leases that ended before are not counted."
    optional = {"cost": 7, "energy_kwh": 8}
    extra = [name for name in optional if total[name] is not None and (name != "cost" or total[name])]
    table = FittedTable(
        *(Column(name.replace("_", " ")) for name in report["by"]),
        Column("granted", justify="right"),
        *(Column(name, order, justify="right") for name, order in REPORT_COLUMNS.items()),
        *(Column(name.replace("_", " "), optional[name], justify="right") for name in extra),
        title=title,
    )
    for row in (*report["rows"], total):
        group = row["group"].values() if row is not total else ("all", *[""] * (len(report["by"]) - 1))
        amounts = (row[name] for name in ("granted", *REPORT_COLUMNS, *extra))
        table.add_row(*group, *("-" if amount is None else f"{amount:,.1f}" for amount in amounts))
    most = most_wasted(report["rows"])
    return Group(table, *([] if most is None else [Text(who_wasted_most(most))]))


def who_wasted_most(most: Row) -> str:
    """Return a sentence about the row of a report that wasted most."""
    parts = ", ".join(f"{most[name]:,.1f} {name}" for name in WASTED if most[name])
    who = " ".join(most["group"].values())
    return f"{who} wasted most: {wasted(most):,.1f} of {most['granted']:,.1f} GPU-hours ({parts})"
