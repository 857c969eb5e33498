"""Figures of replays: allocation and fragmentation over time or load, waiting times, busy servers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.report import pyplot, save_figure

HEAT_MAPS = 6
"""Maximum number of heat maps drawn."""


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return matplotlib figures by title; runs of one name with several seeds share one colour."""
    found = {
        "GPU capacity in use": _curves(results, "allocated_percent", "GPU milli allocated, %"),
        "Idle capacity of no use": _curves(results, "frag_ratio_percent", "of idle GPU milli, %"),
    }
    if "waits_s" in results[0]:
        found["Waiting times"] = _waits(results)
        found["Queue"] = _curves(results, "waiting", "pending jobs")
        found["GPUs in use by server"] = _heat_maps(results)
    return found


def save(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write each figure as a PNG file named after its title."""
    for title, figure in figures(results).items():
        save_figure(figure, folder / f"{title.lower().replace(' ', '-')}.png")


def as_images(results: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """Yield (title, data URL) of each figure."""
    for title, figure in figures(results).items():
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=90, bbox_inches="tight")
        pyplot().close(figure)
        yield title, "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(result["case"]["name"] for result in results))


def _curves(results: Sequence[Mapping[str, Any]], quantity: str, label: str) -> Any:
    figure, axes = pyplot().subplots(figsize=(7.5, 3.6))
    by_load = "arrived_percent" in results[0]["curve"]
    names = _names(results)
    for result in results:
        place = names.index(result["case"]["name"])
        across = result["curve"]["arrived_percent"] if by_load else _hours(result["curve"]["at_s"])
        first = result is next(r for r in results if r["case"]["name"] == names[place])
        axes.plot(
            across,
            result["curve"][quantity],
            color=f"C{place % 10}",
            linestyle="-" if place < 10 else "--",
            linewidth=1.2,
            drawstyle="default" if by_load else "steps-post",
            label=names[place] if first else None,
        )
    axes.set_xlabel("arrived load, % of all GPUs" if by_load else "time, hours")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _hours(seconds: Sequence[float]) -> list[float]:
    return [value / 3600 for value in seconds]


def _waits(results: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(7.5, 3.6))
    names = _names(results)
    for place, name in enumerate(names):
        waits = sorted(w for r in results if r["case"]["name"] == name for w in r["waits_s"])
        if waits:
            shares = [100 * (rank + 1) / len(waits) for rank in range(len(waits))]
            axes.plot(waits, shares, color=f"C{place % 10}", drawstyle="steps-post", label=name)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("waiting time, s")
    axes.set_ylabel("jobs that wait no longer, %")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)
    return figure


def _heat_maps(results: Sequence[Mapping[str, Any]]) -> Any:
    firsts = {result["case"]["name"]: result for result in reversed(results)}
    names = _names(results)[:HEAT_MAPS]
    figure, grid = pyplot().subplots(
        len(names), 1, figsize=(7.5, 0.6 + 1.5 * len(names)), squeeze=False, sharex=True
    )
    picture = None
    for axes, name in zip(grid[:, 0], names, strict=True):
        heat = firsts[name]["heat"]
        hours = max(heat["end_s"] / 3600, 1e-9)
        picture = axes.imshow(
            heat["shares"],
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            vmax=1,
            cmap="viridis",
            extent=(0, hours, len(heat["nodes"]), 0),
        )
        axes.set_title(name, fontsize=8)
        axes.set_ylabel("server")
    grid[-1, 0].set_xlabel("time, hours")
    figure.colorbar(picture, ax=list(grid[:, 0]), label="share of GPU milli in use")
    return figure
