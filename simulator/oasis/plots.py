"""Figures of a comparison: utility, ratio to the optimum, decision time, target gap, prices over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from simulator.oasis.experiment import Comparison
from simulator.oasis.ledger import Floats, Ledger
from simulator.oasis.model import Instance
from simulator.oasis.prices import Prices
from simulator.present.figures import draw_boxes, draw_heat, draw_log_scale, draw_sweep, height_of, new_figure

LEAST_PRICE = 1e-280
"""Highest price below which a scale of logarithms cannot be drawn."""


class PriceRecorder:
    """Recorder of the price of one worker of the mean demand on each worker server, slot by slot."""

    def __init__(self, instance: Instance, prices: Prices) -> None:
        self.prices = prices
        demands = np.array([job.worker_units for job in instance.jobs])
        self.demand = tuple(round(amount) for amount in demands.mean(axis=0).tolist())
        self.rows: list[Floats] = []

    def __call__(self, slot: int, ledger: Ledger) -> None:
        self.rows.append(self.prices.unit_price(ledger.worker, self.demand, slot)[0])


def draw_all(
    summary: Mapping[str, Any], comparisons: Sequence[Comparison], watch: PriceRecorder | None
) -> dict[str, Any]:
    """Return the figures that the runs allow, by file name without its ending."""
    algorithms = summary["algorithms"]
    runs = {name: [comparison.runs[name] for comparison in comparisons] for name in algorithms}
    decisions = {
        name: [1000 * spent for run in mine for spent in run.decision_s]
        for name, mine in runs.items()
        if name != "optimal"
    }
    gaps = {
        name: [o.target_gap for run in mine for o in run.outcomes if o.target_gap is not None]
        for name, mine in runs.items()
    }
    found = {
        "utility": boxes({name: each["utility"] for name, each in algorithms.items()}, "utility"),
        "decision_time": boxes(decisions, "decision time, ms per job", logarithmic=True),
        "target_gap": boxes(gaps, "slots after the target duration"),
    }
    if "optimal" in algorithms:
        ratios = {name: ratios_of(each) for name, each in algorithms.items() if name != "optimal"}
        found["ratio_to_optimum"] = boxes(ratios, "optimum / utility", logarithmic=True)
    if watch is not None:
        found["prices"] = prices_over_time(watch)
    for axis, points in summary.get("sweeps", {}).items():
        found[f"utility_by_{axis}"] = over_axis(axis, points)
    return found


def ratios_of(figures: Mapping[str, Any]) -> list[float]:
    """Return the optimum over the utility of each instance that gives both; none without an optimum."""
    return [ratio for ratio in figures.get("optimal_over_utility", ()) if ratio is not None]


def boxes(values: Mapping[str, Sequence[float]], label: str, *, logarithmic: bool = False) -> Any:
    """Draw one box per algorithm: quartiles, whiskers, and the mean as a diamond."""
    figure, axes = new_figure(height=height_of(len(values)))
    draw_boxes(axes, values)
    if logarithmic:
        draw_log_scale(axes.xaxis)
    axes.set_xlabel(label)
    return figure


def prices_over_time(watch: PriceRecorder) -> Any:
    """Draw a heat map, servers by slots, of the price of a worker."""
    from matplotlib.colors import LogNorm

    prices = np.array(watch.rows).T
    # Where nothing has a price there is no logarithm of any.
    norm = LogNorm() if prices.max() > LEAST_PRICE else None
    figure, axes = new_figure(height=1.6 + 0.12 * len(prices))
    image = draw_heat(axes, prices, across=(0, len(watch.rows)), norm=norm)
    axes.set_xlabel("slot")
    axes.set_ylabel("worker server")
    figure.colorbar(image, ax=axes, label="price of a worker", format="%g")
    return figure


def over_axis(axis: str, points: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw each algorithm's mean utility against the number of jobs, of servers, or the load."""
    figure, axes = new_figure()
    means = {
        float(value): {name: fmean(each["utility"]) for name, each in point["algorithms"].items()}
        for value, point in points.items()
    }
    draw_sweep(axes, axis, means, "mean utility")
    axes.set_ylim(bottom=0)
    return figure
