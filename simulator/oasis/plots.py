"""Figures of a comparison: utility, ratio to the optimum, decision time, target gap, prices over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from simulator.oasis.experiment import Comparison
from simulator.oasis.ledger import Floats, Ledger
from simulator.oasis.model import Instance
from simulator.oasis.prices import Prices
from simulator.report import pyplot, save_figure


class PriceRecorder:
    """Recorder of the price of one worker of the mean demand on each worker server, slot by slot."""

    def __init__(self, instance: Instance, prices: Prices) -> None:
        self.prices = prices
        demands = np.array([job.worker_units for job in instance.jobs])
        self.demand = tuple(round(amount) for amount in demands.mean(axis=0).tolist())
        self.rows: list[Floats] = []

    def __call__(self, slot: int, ledger: Ledger) -> None:
        self.rows.append(self.prices.unit_price(ledger.worker, self.demand, slot)[0])


def plot_comparison(folder: Path, comparisons: Sequence[Comparison], watch: PriceRecorder | None) -> None:
    """Write the figures that the runs allow into the folder."""
    names = list(comparisons[0].runs)
    runs = {name: [comparison.runs[name] for comparison in comparisons] for name in names}
    plot_boxes(
        folder / "utility.png",
        {name: [run.utility for run in mine] for name, mine in runs.items()},
        "utility",
    )
    plot_boxes(
        folder / "decision_time.png",
        {
            name: [1000 * spent for run in mine for spent in run.decision_s]
            for name, mine in runs.items()
            if name != "optimal"
        },
        "decision time, ms per job",
        logarithmic=True,
    )
    plot_boxes(
        folder / "target_gap.png",
        {
            name: [
                outcome.target_gap
                for run in mine
                for outcome in run.outcomes
                if outcome.target_gap is not None
            ]
            for name, mine in runs.items()
        },
        "slots after the target duration",
    )
    optima = [comparison.optimum for comparison in comparisons if comparison.optimum is not None]
    if optima:
        plot_boxes(
            folder / "ratio_to_optimum.png",
            {
                name: [
                    optimum.utility / run.utility
                    for optimum, run in zip(optima, mine, strict=True)
                    if run.utility > 0
                ]
                for name, mine in runs.items()
                if name != "optimal"
            },
            "optimum / utility",
            logarithmic=True,
        )
    if watch is not None:
        plot_prices(folder / "prices.png", watch)


def plot_boxes(
    path: Path, values: Mapping[str, Sequence[float]], label: str, *, logarithmic: bool = False
) -> None:
    """Draw one box per algorithm: quartiles, whiskers, and the mean as a triangle."""
    some = {name: list(found) for name, found in values.items() if len(found)}
    figure, axes = pyplot().subplots(figsize=(1.2 + 1.0 * max(2, len(some)), 3.6))
    if some:
        axes.boxplot(list(some.values()), tick_labels=list(some), showmeans=True)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    save_figure(figure, path)


def plot_prices(path: Path, watch: PriceRecorder) -> None:
    """Draw a heat map, servers by slots, of the price of a worker."""
    from matplotlib.colors import LogNorm

    figure, axes = pyplot().subplots(figsize=(7, 1.6 + 0.12 * len(watch.rows[0])))
    image = axes.imshow(np.array(watch.rows).T, aspect="auto", interpolation="nearest", norm=LogNorm())
    axes.set_xlabel("slot")
    axes.set_ylabel("worker server")
    figure.colorbar(image, ax=axes, label="price of a worker, utility a slot")
    save_figure(figure, path)


def plot_sweep(path: Path, axis: str, points: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw each algorithm's mean utility against the number of jobs, of servers, or the load."""
    figure, axes = pyplot().subplots(figsize=(5, 3.6))
    values = [float(value) for value in points]
    for name in next(iter(points.values()))["algorithms"]:
        means = [fmean(point["algorithms"][name]["utility"]) for point in points.values()]
        axes.plot(values, means, marker="o", label=name)
    axes.set_xticks(values)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.set_ylabel("mean utility")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
