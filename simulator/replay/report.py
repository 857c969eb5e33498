"""Reports of replays and comparisons: tables for terminal and page, figures, and one page with everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resource_manager.core.models import Node
from simulator.io.files import write_text
from simulator.present.figures import (
    WIDTH,
    Bar,
    Curve,
    draw_gantt,
    draw_heat,
    draw_lines,
    draw_time_scale,
    drawing,
    new_figure,
    picture,
    same_together,
    save_png,
    show_shares,
)
from simulator.present.page import Page, Section, render
from simulator.present.tables import Cell, Column, Table
from simulator.present.units import time_unit
from simulator.replay.metrics import BINS, UNFAIR_ABOVE
from simulator.replay.verdict import by_team, cautions, distinct, findings, rows, verdict

Result = dict[str, Any]

MAX_HEAT_MAPS = 16
MAX_NAMED_SERVERS = 12
"""Servers above which a heat map does not name its rows."""

HEAT_MAPS = "GPUs in use by server"

TIMED = (
    ("mean_wait_s", Column("mean wait", "time", 2)),
    ("p95_wait_s", Column("95 % wait at most", "time", 2)),
    ("max_wait_s", Column("longest wait", "time", 2)),
    ("mean_jct_s", Column("submission to end, mean", "time", 2)),
    ("allocated_percent", Column("GPUs in use", "share")),
    ("occupied_nodes_percent", Column("servers in use", "share")),
    ("frag_ratio_percent", Column("free GPU capacity of no use", "share")),
    ("mean_queue_length", Column("jobs waiting, mean", digits=1)),
    ("worst_ftf", Column("worst fairness")),
    ("unfair_percent", Column("treated unfairly", "share")),
    ("preemptions", Column("preemptions", digits=0)),
    ("lost_gpu_s", Column("GPU time lost to restarts", "time")),
    ("started", Column("jobs started", digits=0)),
    ("jobs", Column("of jobs", digits=0)),
)
OF_SOME = ("worst_ftf", "unfair_percent", "preemptions", "lost_gpu_s")
"""Columns left out where no run has the figure."""

PLACED = (
    ("placed", Column("pods placed", digits=0)),
    ("pods", Column("of pods", digits=0)),
    ("never_fit", Column("fit no node", digits=0)),
    ("allocated_percent", Column("GPUs in use", "share", 2)),
    ("frag_ratio_percent", Column("free GPU capacity of no use", "share", 2)),
    ("pods_per_s", Column("pods/s", digits=0)),
)
TEAMS_TEXT = (
    "A team inside its guarantee comes first, and with preemption takes back what others borrow. A wait is "
    "all the time without a lease, also after a preemption; what a job did since its last checkpoint is "
    "done again."
)
NO_USE = "Free GPU capacity is of no use where the usual jobs do not fit what is left of a GPU, CPU or type."

FAIRNESS = (
    " Fairness: a job's time from submission to end over the time with an equal share of the cluster among "
    f"all jobs (Themis); the worst of a run, and the part above {UNFAIR_ABOVE:g}, treated unfairly."
)


def table_of(results: Sequence[Result]) -> Table:
    """Return a row of figures for each policy and order, those with the same figures together."""
    found = distinct(rows(results))
    kinds = [
        (key, column)
        for key, column in (PLACED if "pods" in found[0] else TIMED)
        if any(key in row for row in found) or key not in OF_SOME
    ]
    if all(row["jobs"] == row["started"] for row in found if "started" in row) and "started" in found[0]:
        kinds = [
            (key, Column("jobs, all started", digits=0) if key == "jobs" else column)
            for key, column in kinds
            if key != "started"
        ]
    if any(row["runs"] > 1 for row in found):
        kinds.insert(0, ("runs", Column("runs, mean of", digits=0)))
    cells: list[list[Cell]] = [
        [row["name"], *(_cell(row.get(key), column) for key, column in kinds)] for row in found
    ]
    named = "policy" if "pods" in found[0] else "policy and order"
    return Table([Column(named, "text"), *(column for _, column in kinds)], cells, note=_note(found))


def _note(rows: Sequence[dict[str, Any]]) -> str:
    """Return what the columns mean that do not say it themselves."""
    fairness = "" if not any("worst_ftf" in row for row in rows) else FAIRNESS
    several = [row["names"] for row in rows if len(row["names"]) > 2]
    equal = "".join(f" Equal to {first}: {'; '.join(others)}." for first, *others in several)
    return f"{NO_USE}{fairness}{equal}"


BY_TEAM = (
    ("guaranteed", Column("GPUs guaranteed", "text")),
    ("jobs", Column("jobs", digits=0)),
    ("mean_wait_s", Column("mean wait", "time", 2)),
    ("p95_wait_s", Column("95 % wait at most", "time", 2)),
    ("preempted", Column("preemptions", digits=0)),
    ("lost_gpu_s", Column("GPU time done again", "time")),
)


def team_table(results: Sequence[Result]) -> Table | None:
    """Return a row for each team under each run, those of a team together; None without rules of teams."""
    found = [result for result in results if "teams" in result["summary"]]
    if not found:
        return None
    several = len(found) > 1
    cells: list[list[Cell]] = []
    for team in found[0]["summary"]["teams"]:
        for result in found:
            figures = result["summary"]["teams"][team]
            run = [result["case"]["name"]] if several else []
            cells.append([team, *run, *(figures[key] for key, _ in BY_TEAM)])
    run_column = [Column("run", "text")] if several else []
    return Table([Column("team", "text"), *run_column, *(column for _, column in BY_TEAM)], cells)


def _cell(value: float | None, column: Column) -> float | None:
    return value / 100 if value is not None and column.kind == "share" else value


def page_of(title: str, results: Sequence[Result]) -> str:
    """Return the page: verdict and cautions, the table, what differs and why, the figures."""
    heat = _heat_of(results)
    drawn = figures(results)
    maps = drawn.pop(HEAT_MAPS, None)
    pictures = [picture(name, figure) for name, figure in drawn.items()]
    sections = [Section("What was compared" if len(results) > 1 else "Figures", tables=[table_of(results)])]
    if teams := team_table(results):
        sections.append(Section("By team", "\n".join([*by_team(results), TEAMS_TEXT]), tables=[teams]))
    if sentences := findings(results):
        sections.append(Section("Each compared with the first", "\n".join(sentences)))
    if maps is None and pictures:
        sections.append(Section("Over load", pictures=pictures))
    if maps is not None:
        text = f"Each point is a mean over 1/{BINS} of the time."
        sections.append(Section("Over time", text, pictures=pictures))
        sections.append(Section(HEAT_MAPS, _heat_text(results, heat), (), [picture("", maps, wide=True)]))
    return render(Page(title, [*verdict(results), *cautions(results)], sections))


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return matplotlib figures by title; equal lines are drawn once, seeds of one name in one colour."""
    if not all(result["curve"].get("at_s", True) for result in results):  # there was no job
        return {}
    if not all(heat["nodes"] for heat in _heat_of(results).values()):  # there was no server
        return {}
    with drawing():
        found = {"GPUs in use": _curves(results, "allocated_percent", share=True)}
        if "waits_s" in results[0]:
            found["How long jobs wait"] = _cdf(results, "waits_s", "wait", "jobs that wait no longer")
            found["How long jobs take"] = _cdf(
                results, "jct_s", "submission to end", "jobs that take no longer"
            )
            if all(result["ftf"] for result in results):  # above 1 a job was held back
                across = "time to completion / that with an equal share"
                found["Finish-time fairness"] = _cdf(
                    results, "ftf", across, "jobs that are treated no worse", of_times=False
                )
            found["Jobs waiting"] = _curves(results, "waiting", share=False)
            found[HEAT_MAPS] = _heat_maps(_heat_of(results))
        else:
            found["Free GPU capacity of no use"] = _curves(results, "frag_ratio_percent", share=True)
    return found


def write_report(title: str, result: Result, folder: Path) -> None:
    """Write one run as `report.html`, and each of its figures as a PNG file named after its title."""
    write_text(folder / "report.html", page_of(title, [result]))
    for name, figure in figures([result]).items():
        save_png(figure, folder / f"{name.lower().replace(' ', '-')}.png")


def save_timeline(bars: Sequence[Bar], nodes: Iterable[Node], folder: Path) -> None:
    """Write timeline.png: the bars in rows of all servers that ever existed, a colour for each job."""
    if not bars:
        return
    first = min(bar.begin for bar in bars)
    bars = [Bar(bar.row, bar.begin - first, bar.end - first, bar.group) for bar in bars]
    with drawing():
        figure, axes = new_figure(width=2 * WIDTH)
        draw_gantt(axes, bars, list(dict.fromkeys(node.name for node in nodes)))
        save_png(figure, folder / "timeline.png")


def _by_name(results: Sequence[Result], read: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for result in results:
        found.setdefault(result["case"]["name"], []).append(read(result))
    return found


def _curves(results: Sequence[Result], quantity: str, *, share: bool) -> Any:
    figure, axes = new_figure()
    by_load = "arrived_percent" in results[0]["curve"]
    across = "arrived_percent" if by_load else "at_s"
    unit = time_unit(0.0 if by_load else max(result["curve"]["at_s"][-1] for result in results))
    per_cent = 100 if share else 1

    def curve(result: Result) -> Curve:
        values = result["curve"]
        return unit.scaled(values[across]), [value / per_cent for value in values[quantity]]

    draw_lines(axes, _by_name(results, curve), steps=not by_load)
    axes.set_xlabel("requested, % of all GPUs" if by_load else f"time, {unit.name}")
    axes.set_ylim(bottom=0)
    if share:
        show_shares(axes.yaxis)
    return figure


def _cdf(results: Sequence[Result], quantity: str, across: str, below: str, *, of_times: bool = True) -> Any:
    """Draw the share of jobs up to each value of a quantity."""
    figure, axes = new_figure()

    def curve(values: Sequence[float]) -> list[Curve]:
        return [(values, [(rank + 1) / len(values) for rank in range(len(values))])] if values else []

    found = {
        name: curve(sorted(value for run in runs for value in run))
        for name, runs in _by_name(results, lambda result: result[quantity]).items()
    }
    draw_lines(axes, found, steps=True)
    if of_times:
        draw_time_scale(axes.xaxis)
    axes.set_xlim(left=0)
    axes.set_xlabel(across)
    axes.set_ylabel(below)
    show_shares(axes.yaxis)
    return figure


def _heat_of(results: Sequence[Result]) -> dict[str, Any]:
    """Return what to draw by name: the first seed of each policy and order, equal ones once."""
    if "heat" not in results[0]:
        return {}
    return same_together({name: runs[0] for name, runs in _by_name(results, lambda r: r["heat"]).items()})


def _heat_text(results: Sequence[Result], heat: Mapping[str, Any]) -> str:
    parts = []
    if len(heat) > MAX_HEAT_MAPS:
        parts.append(
            f"The first {MAX_HEAT_MAPS} of {len(heat)} different runs: more do not fit on a page. "
            "Compare fewer policies or orders to see the others."
        )
    if any(len(seeds) > 1 for seeds in _by_name(results, lambda result: result["case"]["seed"]).values()):
        parts.append("Of several seeds, the first.")
    return " ".join(parts)


def _heat_maps(heat: Mapping[str, Any]) -> Any:
    shown = dict(list(heat.items())[:MAX_HEAT_MAPS])
    servers = max(len(each["nodes"]) for each in shown.values())
    height = 0.6 + min(2.2, 0.7 + 0.16 * servers) * len(shown)
    figure, grid = new_figure(width=2 * WIDTH, height=height, rows=len(shown))
    unit = time_unit(max(each["end_s"] for each in shown.values()))
    every = grid if len(shown) > 1 else [grid]
    for axes, (name, each) in zip(every, shown.items(), strict=True):
        across = (0.0, max(each["end_s"] / unit.seconds, 1e-9))
        image = draw_heat(axes, each["shares"], across=across)
        axes.set_title(name)
        if len(each["nodes"]) <= MAX_NAMED_SERVERS:
            axes.set_yticks([place + 0.5 for place in range(len(each["nodes"]))], each["nodes"])
        else:
            axes.set_yticks([])
            axes.set_ylabel(f"{len(each['nodes'])} servers")
    every[-1].set_xlabel(f"time, {unit.name}")
    bar = figure.colorbar(image, ax=list(every), label="GPUs in use")
    show_shares(bar.ax.yaxis)
    return figure
