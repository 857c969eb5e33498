"""Report of a comparison: a verdict, tables for terminal and page, and the page with the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from simulator.io.files import write_text
from simulator.oasis.experiment import Comparison
from simulator.oasis.plots import PriceRecorder, draw_all, ratios_of
from simulator.present.figures import drawing, picture, same_together, save_png
from simulator.present.page import Page, Section, render
from simulator.present.tables import Cell, Column, Table
from simulator.present.units import duration, number, share
from simulator.stats import is_above

Summary = Mapping[str, Any]
"""Value of `experiment.summarise`, with `sweeps` and `calibration` where asked for."""

TITLES = {
    "utility": "Utility by algorithm",
    "decision_time": "Processor time of a decision",
    "target_gap": "Slots later than the target",
    "ratio_to_optimum": "Optimum over utility",
    "prices": "Price of a worker over time",
}


def write_report(
    folder: Path, summary: Summary, comparisons: Sequence[Comparison], watch: PriceRecorder | None
) -> None:
    """Write `report.html`, and each figure as a PNG file."""
    with drawing():
        figures = draw_all(summary, comparisons, watch)
        pictures = [
            picture(TITLES.get(name, name.replace("_", " ").capitalize()), figure)
            for name, figure in figures.items()
        ]
        for name, figure in figures.items():
            save_png(figure, folder / f"{name}.png")
    sections = [Section("Results", tables=tables(summary)), Section("Figures", pictures=pictures)]
    page = Page("Training jobs scheduled by resource prices", verdict(summary), sections)
    write_text(folder / "report.html", render(page))


def verdict(summary: Summary) -> list[str]:
    """Return sentences: which algorithm brings most utility, how far from the optimum, what was fitted."""
    algorithms = summary["algorithms"]
    lines = []
    online = same_together({name: each["utility"] for name, each in algorithms.items() if name != "optimal"})
    means = sorted(((fmean(each), name) for name, each in online.items()), reverse=True)
    if means:
        (most, best), *others = means
        equal = [name for _, name in others if not is_above(online[best], online[name])]
        rest = ", ".join(
            f"{most / mean:.2f} times that of {name}" if mean > 0 else f"{name} none" for mean, name in others
        )
        runs = len(summary["seeds"])
        what = "the most utility:" if others and not equal else "a utility of"
        lines.append(
            f"{best} brings {what} {number(most, 1)}"
            f"{f' on average over {runs} instances' if runs > 1 else ''}{f', {rest}' if rest else ''}."
        )
        if equal:
            lines.append(
                f"That is no more than chance gives beside {', '.join(equal)}: the 95 % confidence intervals "
                "overlap; compare over more seeds."
            )
    optimal = algorithms.get("optimal")
    if optimal:
        for name, each in algorithms.items():
            if name == "oasis" and (ratios := ratios_of(each)):
                lines.append(
                    f"The optimum is {fmean(ratios):.3f} times OASiS's utility on average, {max(ratios):.3f}"
                    " times at worst."
                )
        lines.append(
            f"The optimum is proven for {sum(optimal['proven'])} of {len(optimal['proven'])} instances, with"
            f" a gap of at most {share(max(optimal['gap']), 2)}, in {duration(fmean(optimal['seconds']))} on"
            " average."
        )
    if "calibration" in summary:
        fitted = summary["calibration"]
        lines.append(
            f"Calibrated on {fitted['trained_on']} other instances: utility floor"
            f" {fitted['utility_floor']:g}, eta {fitted['eta']:.3g}."
        )
    return lines


def tables(summary: Summary) -> list[Table]:
    """Return the means over the instances, a row per algorithm, and a table for every sweep."""
    columns = [
        Column("algorithm", "text"),
        *(Column(name, digits=1) for name in ("utility", "accepted", "completed")),
        Column("decision", "time", 2),
    ]
    with_optimum = any("optimal_over_utility" in figures for figures in summary["algorithms"].values())
    if with_optimum:
        columns.append(Column("optimum / utility", digits=3))
    rows: list[list[Cell]] = []
    for name, figures in summary["algorithms"].items():
        ratios = ratios_of(figures)
        spent = figures.get("decision_ms_mean")
        means = [fmean(figures[key]) for key in ("utility", "accepted", "completed")]
        rows.append([name, *means, None if spent is None else spent / 1000])
        if with_optimum:
            rows[-1].append(fmean(ratios) if ratios else None)
    instances = len(summary["seeds"])
    found = [Table(columns, rows, f"means over {instances} instances" if instances > 1 else "one instance")]
    for axis, points in summary.get("sweeps", {}).items():
        names = [Column("algorithm", "text"), *(Column(value, digits=1) for value in points)]
        means_by: list[list[Cell]] = [
            [name, *(fmean(point["algorithms"][name]["utility"]) for point in points.values())]
            for name in summary["algorithms"]
        ]
        found.append(Table(names, means_by, f"mean utility by {axis}"))
    return found
