"""Tables of a comparison's results for the terminal."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import click
from rich.console import Console
from rich.table import Table


def print_tables(summary: dict[str, Any]) -> None:
    """Print the means over the instances, one row per algorithm."""
    table = Table(title=f"means over {len(summary['seeds'])} instance(s)")
    columns = ("algorithm", "utility", "accepted", "completed", "decision ms", "optimum / utility")
    for column in columns:
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for name, figures in summary["algorithms"].items():
        ratios = [ratio for ratio in figures.get("optimal_over_utility", ()) if ratio is not None]
        decision_ms = figures.get("decision_ms_mean")
        table.add_row(
            name,
            f"{fmean(figures['utility']):.1f}",
            f"{fmean(figures['accepted']):.1f}",
            f"{fmean(figures['completed']):.1f}",
            "" if decision_ms is None else f"{decision_ms:.2f}",
            f"{fmean(ratios):.3f}" if ratios else "",
        )
    Console().print(table)
    for axis, by_value in summary.get("sweeps", {}).items():
        console_table = Table(title=f"mean utility by {axis}")
        console_table.add_column("algorithm")
        for value in by_value:
            console_table.add_column(value, justify="right")
        for name in summary["algorithms"]:
            means = [fmean(point["algorithms"][name]["utility"]) for point in by_value.values()]
            console_table.add_row(name, *(f"{mean:.1f}" for mean in means))
        Console().print(console_table)
    optimal = summary["algorithms"].get("optimal")
    if optimal:
        proven = sum(optimal["proven"])
        click.echo(
            f"optimum proven for {proven} of {len(optimal['proven'])}, "
            f"largest gap {max(optimal['gap']):.2%}, "
            f"mean time {fmean(optimal['seconds']):.1f} s"
        )
    if "calibration" in summary:
        fitted = summary["calibration"]
        click.echo(
            f"calibrated on {fitted['trained_on']} other instances: "
            f"utility floor {fitted['utility_floor']:g}, eta {fitted['eta']:.3g}"
        )
