"""Plots in one style: drawn once, saved as PNG files, and set into pages as SVG that follows the theme."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from simulator.io.files import write_atomically
from simulator.present.palette import HEAT, SERIES_COLOURS, VARIABLES, light, style_of
from simulator.present.tables import Spread
from simulator.present.units import time_unit

WIDTH, HEIGHT = 5.6, 3.2
"""Inches of a usual figure: its text stays readable on a page of 390 pixels."""
LEGEND_CHARACTERS = 70
MANY_BARS = 2000
"""Bars above which a Gantt chart is kept in a page as a picture, not as one shape each."""

MANY_ROWS = 50
"""Rows above which those of a Gantt chart are not named, for want of space."""

Curve = tuple[Sequence[float], Sequence[float]]
"""Values across and up."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Figure on a page."""

    title: str
    svg: str
    wide: bool = False


@contextmanager
def drawing(fonts: Sequence[str] = ("DejaVu Sans",)) -> Iterator[None]:
    """Set matplotlib's style for the figures that are made and saved inside."""
    import matplotlib

    settings: Any = {
        "font.family": list(fonts),
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": light("quiet"),
        "axes.labelcolor": light("ink"),
        "axes.unicode_minus": False,
        "axes.formatter.use_mathtext": False,
        "text.color": light("ink"),
        "text.parse_math": False,  # names may contain dollar signs
        "xtick.color": light("quiet"),
        "ytick.color": light("quiet"),
        "xtick.labelcolor": light("ink"),
        "ytick.labelcolor": light("ink"),
        "grid.color": light("rule"),
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "figure.dpi": 72,
        "figure.constrained_layout.use": True,
        "svg.fonttype": "none",
    }
    with matplotlib.rc_context(settings):
        yield


def new_figure(*, width: float = WIDTH, height: float = HEIGHT, rows: int = 1) -> tuple[Any, Any]:
    """Return a figure that pyplot does not keep open, and its axes (an array for several rows)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, 1, sharex=rows > 1)


def height_of(rows: int) -> float:
    """Return the height in inches of a figure with that many named rows."""
    return 1.0 + 0.34 * max(rows, 1)


def save_png(figure: Any, path: Path) -> None:
    """Save a figure as a PNG file, as a whole or not at all."""
    write_atomically(path, lambda temporary: _save(figure, temporary))


def _save(figure: Any, target: Any, **options: Any) -> None:
    """Save a figure without a warning on the screen about letters that no font has: they are boxes there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ")
        figure.savefig(target, dpi=150, **options)


def picture(title: str, figure: Any, *, wide: bool = False) -> Picture:
    """Return a figure as SVG whose colours are the page's and whose ids are the title's own."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        _save(figure, text, format="svg", transparent=True, metadata={"Date": None})
    figure.set_layout_engine("none")  # laid out now; a PNG file of it need not do it again
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # matplotlib numbers the parts of every figure from 1
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: VARIABLES.get(found[0], found[0]), svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    return Picture(title, svg, wide)


def same_together(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return each different value once, under the names of all that have it."""
    found: list[tuple[list[str], Any]] = []
    for name, value in values.items():
        for names, other in found:
            if other == value:
                names.append(name)
                break
        else:
            found.append(([name], value))
    return {" = ".join(names): value for names, value in found}


def draw_lines(
    axes: Any, series: Mapping[str, Sequence[Curve]], *, steps: bool = False, marker: str = ""
) -> None:
    """Draw the curves of each name (one per run) in one colour; equal ones once, named together."""
    for place, (name, curves) in enumerate(same_together(series).items()):
        for run, (across, up) in enumerate(curves):
            label = textwrap.fill(name, LEGEND_CHARACTERS - 8, subsequent_indent="  ") if run == 0 else None
            draw_style = "steps-post" if steps else "default"
            axes.plot(across, up, drawstyle=draw_style, marker=marker, label=label, **style_of(place))
    legend_below(axes)


def draw_sweep(axes: Any, axis: str, points: Mapping[float, Mapping[str, Any]], label: str) -> None:
    """Draw a line per name over the values of a sweep, from the least on."""
    values = sorted(points)
    lines = {name: [(values, [points[value][name] for value in values])] for name in points[values[0]]}
    draw_lines(axes, lines, marker="o")
    axes.set_xticks(values)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(axis)
    axes.set_ylabel(label)


def legend_below(axes: Any) -> None:
    """Put the legend, if there is anything to name, under the axes, and make the figure that much higher."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        widest = 6 + max(len(label) + sum(east_asian_width(c) in "WF" for c in label) for label in labels)
        columns = max(1, min(3, LEGEND_CHARACTERS // widest))
        rows = sum(label.count("\n") + 1 for label in labels) / columns
        axes.figure.set_figheight(axes.figure.get_figheight() + 0.18 * rows)
        axes.figure.legend(handles, labels, loc="outside lower left", ncols=columns)


def draw_points(axes: Any, values: Mapping[str, Spread]) -> None:
    """Draw a row per name with a point at its mean and its confidence interval; no line joins names."""
    shown = {name: value for name, value in values.items() if value.mean is not None}
    halves = [value.half or 0.0 for value in shown.values()]
    means = [value.mean for value in shown.values()]
    axes.errorbar(means, range(len(shown)), xerr=halves, fmt="o", capsize=4, color=light("series-1"))
    _name_rows(axes, list(shown))


def draw_boxes(axes: Any, values: Mapping[str, Sequence[float]]) -> None:
    """Draw a row per name with quartiles, whiskers and outliers, and the mean as a diamond."""
    some = {name: list(found) for name, found in values.items() if len(found)}
    if some:
        line = {"color": light("series-1")}
        mark = {"markeredgecolor": light("series-2"), "markerfacecolor": light("series-2")}
        axes.boxplot(
            list(some.values()),
            positions=range(len(some)),
            orientation="horizontal",
            showmeans=True,
            meanprops={"marker": "D", "markersize": 5, **mark},
            medianprops=line,
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            flierprops={"markersize": 3, "markeredgecolor": light("quiet")},
        )
    _name_rows(axes, list(some))


def draw_stacked(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a horizontal bar per name, made of the parts."""
    left = [0.0] * len(names)
    for place, (text, values) in enumerate(parts.items()):
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        axes.barh(range(len(names)), values, left=left, label=text, color=colour, height=0.65)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.xaxis.set_major_formatter("{x:,g}")
    _name_rows(axes, names)
    legend_below(axes)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def draw_heat(axes: Any, values: Any, *, across: tuple[float, float], norm: Any = None) -> Any:
    """Draw rows of values as colours from 0 to 1 (or by `norm`); return the image, for a colour bar."""
    axes.grid(visible=False)
    limits = {"norm": norm} if norm is not None else {"vmin": 0, "vmax": 1}
    extent = (*across, len(values), 0)
    return axes.imshow(values, aspect="auto", interpolation="nearest", cmap=HEAT, extent=extent, **limits)


def show_shares(axis: Any) -> None:
    """Label an axis of shares (fractions of one) as per cent, from 0."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
    axis.axes.set(**{f"{axis.axis_name}lim": (0, None)})


def draw_log_scale(axis: Any) -> None:
    """Set a logarithmic scale with plain numbers at 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis._set_axes_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_time_scale(axis: Any) -> None:
    """Set a scale from nothing to months, with ticks that people count in: 1 s, 1 min, 1 hour, 1 day."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = {0: "0", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h"}
    ticks |= {86400: "1 d", 864000: "10 d", 8640000: "100 d"}
    axis._set_axes_scale("symlog", linthresh=1)
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: ticks.get(round(value), "")))


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of a Gantt chart; bars of one group share a colour, those without a group are faded."""

    row: str
    begin: float
    end: float
    group: Hashable | None


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each span the lowest lane that is free from its begin, so that no two of a lane overlap."""
    free_at: list[float] = []
    chosen = [0] * len(spans)
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[place]
        lane = next((lane for lane, free in enumerate(free_at) if free <= begin), len(free_at))
        free_at[lane : lane + 1] = [end]
        chosen[place] = lane
    return chosen


def draw_gantt(axes: Any, bars: Sequence[Bar], rows: Sequence[str], end_s: float | None = None) -> None:
    """Draw the bars (in seconds) in their rows; bars that overlap in time get lanes inside the row.

    With `end_s` time goes from 0 to there, for charts to be compared; else over the bars.
    """
    from matplotlib.collections import PolyCollection

    unit = time_unit(end_s or max((bar.end for bar in bars), default=0.0))
    by_row: dict[str, list[Bar]] = {row: [] for row in rows}
    for bar in bars:
        by_row[bar.row].append(bar)
    groups = {group: place for place, group in enumerate(dict.fromkeys(bar.group for bar in bars))}
    boxes, colours, middles, top = [], [], [], 0.0
    for members in by_row.values():
        chosen = lanes([(bar.begin, bar.end) for bar in members])
        for bar, lane in zip(members, chosen, strict=True):
            left, right, low = bar.begin / unit.seconds, bar.end / unit.seconds, top + lane
            boxes.append([(left, low), (right, low), (right, low + 0.9), (left, low + 0.9)])
            place = groups[bar.group] % (len(SERIES_COLOURS) - 1)  # the last is grey, like faded bars
            colours.append(light("faded") if bar.group is None else SERIES_COLOURS[place])
        count = max(chosen, default=0) + 1
        middles.append(top + count / 2)
        top += count + 0.6
    shapes = PolyCollection(boxes, facecolors=colours, linewidths=0)
    shapes.set_rasterized(len(boxes) > MANY_BARS)
    axes.add_collection(shapes)
    axes.autoscale(axis="x")
    if end_s is not None:
        axes.set_xlim(0.0, end_s / unit.seconds)
    axes.set_ylim(top, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if len(rows) <= MANY_ROWS:
        axes.set_yticks(middles, rows)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(rows)} rows, from {rows[0]} to {rows[-1]}")
    axes.set_xlabel(f"time, {unit.name}")
    axes.figure.set_figheight(min(12.0, max(2.0, 1.0 + 0.1 * top, 1.0 + 0.2 * min(len(rows), MANY_ROWS))))
