"""Figures of a comparison, labelled in English, and in Chinese if a font has the glyphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.present import figures
from simulator.present.palette import light
from simulator.stats import over_seeds
from simulator.vgpu.metrics import STATES, histogram, values_of
from simulator.vgpu.page import FIGURES, SWEPT, Collected, spread
from simulator.vgpu.results import GATES, ScenarioRun

CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",  # the first face of Debian's font collection; it has the Chinese glyphs too
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "Heiti TC",
    "Arial Unicode MS",
)
NO_FONT = (
    "no font with Chinese glyphs found, so the plots are labelled in English only;"
    " on Debian install fonts-noto-cjk and run again"
)
CHINESE = {
    "tasks": "任务数",
    "share of started tasks": "已启动任务占比",
    "interference ratio (actual / ideal duration)": "干扰率（实际/理想时长）",
    "SLO rate": "SLO 满足率",
    "mean compute utilisation": "平均算力利用率",
    "share of tasks": "任务占比",
    "limiter events per run": "每次运行的限流次数",
    "memory gate": "显存门",
    "bandwidth gate": "带宽门",
    "compute gate": "算力门",
    "dropped past 1.5 deadlines": "超过 1.5 倍期限丢弃",
    "cut off by the end": "仿真结束时未完成",
    "never started": "从未启动",
}


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels in both languages if a font has the glyphs, else in English."""

    font: str | None

    @classmethod
    def for_this_machine(cls) -> Labels:
        """Use the first of `CHINESE_FONTS` that is installed and has every glyph of the labels."""
        from matplotlib import font_manager

        wanted = {ord(char) for text in CHINESE.values() for char in text}
        installed = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist}
        for path in font_manager.findSystemFonts() if not installed.keys() & set(CHINESE_FONTS) else []:
            # The font was installed after matplotlib cached its list of fonts.
            if any(name.replace(" ", "")[:11] in path for name in CHINESE_FONTS):
                font_manager.fontManager.addfont(path)
                installed = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist}
        for name in CHINESE_FONTS:
            if name in installed and wanted <= set(font_manager.get_font(installed[name]).get_charmap()):
                return cls(name)
        return cls(None)

    @property
    def fonts(self) -> list[str]:
        """Fonts with which the labels render; a browser, too, takes the second for Chinese glyphs only."""
        return ["DejaVu Sans"] if self.font is None else ["DejaVu Sans", self.font]

    def __call__(self, english: str) -> str:
        return english if self.font is None else f"{english} · {CHINESE[english]}"


def draw_all(
    runs: Mapping[str, Sequence[ScenarioRun]],
    summaries: Mapping[str, Sequence[dict[str, Any]]],
    swept: Mapping[str, Mapping[float, Collected]],
    bucket: float,
    labels: Labels,
) -> dict[str, Any]:
    """Draw all figures of a report, by name; `summaries` are `metrics.summarise` of the runs."""
    ratios = {
        name: sorted(value for run in each for value in values_of(run.outcomes, "interference_ratio"))
        for name, each in runs.items()
    }
    slo = {name: [each["slo_rate"] for each in some] for name, some in summaries.items()}
    compute = {
        name: [
            float(np.mean([node["utilization"]["compute"] for node in each["nodes"].values()]))
            for each in some
        ]
        for name, some in summaries.items()
    }
    reasons = ("dropped past 1.5 deadlines", "cut off by the end", "never started")
    dropped = {
        labels(reason): [
            float(np.mean([each["states"][state] / max(1, each["tasks"]) for each in some]))
            for some in summaries.values()
        ]
        for state, reason in zip(STATES[1:], reasons, strict=True)
    }
    events = {
        labels(f"{gate} gate"): [
            float(np.mean([each["limiter_events"][gate] for each in some])) for some in summaries.values()
        ]
        for gate in GATES
    }
    return {
        "ir_cdf": ir_cdf(ratios, labels),
        "slo_rate": points(slo, "SLO rate", labels),
        "compute_util": points(compute, "mean compute utilisation", labels),
        "drop_rate": stacked(list(summaries), dropped, "share of tasks", labels, shares=True),
        "limiter_events": stacked(list(summaries), events, "limiter events per run", labels),
        **{
            f"sweep_{axis}_{figure}": over_axis(axis, figure, by_value)
            for axis, by_value in swept.items()
            for figure in SWEPT
        },
        **{f"{name}_ir_hist": ir_histogram(values, bucket, labels) for name, values in ratios.items()},
    }


def ir_histogram(values: Sequence[float], bucket: float, labels: Labels) -> Any:
    """Draw a histogram of tasks by interference ratio, with buckets of that width."""
    figure, axes = figures.new_figure()
    buckets = histogram(values, bucket)
    axes.bar(
        [each["from"] for each in buckets],
        [each["tasks"] for each in buckets],
        width=bucket,
        align="edge",
        color=light("series-1"),
        edgecolor=light("paper"),
    )
    axes.axvline(1.25, color=light("limit"), linestyle="--", linewidth=1)
    axes.set_xlabel(labels("interference ratio (actual / ideal duration)"))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(labels("tasks"))
    return figure


def ir_cdf(ratios: Mapping[str, Sequence[float]], labels: Labels) -> Any:
    """Draw the CDF of the interference ratio of started tasks; the legend has the tails above two limits."""
    figure, axes = figures.new_figure()
    curves = {}
    for name, values in figures.same_together(
        {name: values for name, values in ratios.items() if values}
    ).items():
        above = {limit: sum(value > limit for value in values) / len(values) for limit in (1.25, 1.5)}
        label = f"{name}: IR>1.25 {above[1.25]:.1%}, IR>1.5 {above[1.5]:.1%}"
        curves[label] = [(values, [place / len(values) for place in range(1, len(values) + 1)])]
    figures.draw_lines(axes, curves, steps=True)
    axes.axvline(1.25, color=light("quiet"), linestyle=":", linewidth=1)
    axes.set_xlabel(labels("interference ratio (actual / ideal duration)"))
    axes.set_title(labels("share of started tasks"), fontweight="normal")  # too long for the height
    figures.show_shares(axes.yaxis)
    return figure


def points(values: Mapping[str, Sequence[float | None]], title: str, labels: Labels) -> Any:
    """Draw one point per scenario, with its 95 % confidence interval over seeds."""
    figure, axes = figures.new_figure(height=figures.height_of(len(values)))
    figures.draw_points(axes, {name: spread(over_seeds(each)) for name, each in values.items()})
    figures.show_shares(axes.xaxis)
    axes.set_xlim(0, 1)
    axes.set_xlabel(labels(title))
    return figure


def stacked(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    title: str,
    labels: Labels,
    *,
    shares: bool = False,
) -> Any:
    """Draw one stacked bar per scenario."""
    figure, axes = figures.new_figure(height=figures.height_of(len(names)))
    figures.draw_stacked(axes, names, parts)
    if shares:
        figures.show_shares(axes.xaxis)
    axes.set_xlabel(labels(title))
    return figure


def over_axis(axis: str, figure_name: str, by_value: Mapping[float, Collected]) -> Any:
    """Draw the mean of a figure over the values of a sweep, a line per scenario."""
    figure, axes = figures.new_figure()
    means = {
        value: {name: each["confidence"][figure_name]["mean"] for name, each in collected.items()}
        for value, collected in by_value.items()
    }
    label = FIGURES[figure_name][2][0]
    figures.draw_sweep(axes, "duration, s" if axis == "duration" else axis, means, label)
    figures.show_shares(axes.yaxis)
    axes.set_ylim(top=1.08 * axes.get_ylim()[1])  # room for a marker at the top
    return figure
