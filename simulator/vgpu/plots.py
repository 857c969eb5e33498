"""Figures of a sweep, labelled in English, and in Chinese if a font has the glyphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.vgpu.metrics import STATES, over_seeds, values_of
from simulator.vgpu.results import GATES, Run

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
    "scenario": "场景",
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
    def settings(self) -> Any:
        """Settings of matplotlib with which the labels render."""
        families = ["DejaVu Sans"] if self.font is None else [self.font, "DejaVu Sans"]
        return {"font.family": families, "axes.unicode_minus": False, "text.parse_math": False}

    def __call__(self, english: str) -> str:
        return english if self.font is None else f"{english} · {CHINESE[english]}"


def draw_all(
    runs: Mapping[str, Sequence[Run]],
    summaries: Mapping[str, Sequence[dict[str, Any]]],
    bucket: float,
    labels: Labels,
) -> dict[str, Any]:
    """Draw all figures of a report, by file name; `summaries` are `metrics.summarise` of the runs."""
    ratios = {
        name: [value for run in each for value in values_of(run.outcomes, "interference_ratio")]
        for name, each in runs.items()
    }
    return {
        **{
            f"{name}_ir_hist.png": ir_histogram(name, values, bucket, labels)
            for name, values in ratios.items()
        },
        "ir_cdf.png": ir_cdf(ratios, labels),
        "slo_rate.png": slo_rate(summaries, labels),
        "compute_util.png": compute_utilisation(summaries, labels),
        "drop_rate.png": drop_rate(summaries, labels),
        "limiter_events.png": limiter_events(summaries, labels),
    }


def ir_histogram(name: str, values: Sequence[float], bucket: float, labels: Labels) -> Any:
    """Draw a histogram of tasks by interference ratio, with buckets of that width."""
    figure, axes = new_figure()
    if values:
        edges = np.arange(np.floor(min(values) / bucket), np.floor(max(values) / bucket) + 2) * bucket
        axes.hist(values, bins=edges, color="#4f81bd", edgecolor="white")
    axes.axvline(1.25, color="#c0504d", linestyle="--", linewidth=1)
    axes.set_title(name)
    axes.set_xlabel(labels("interference ratio (actual / ideal duration)"))
    axes.set_ylabel(labels("tasks"))
    return figure


def ir_cdf(ratios: Mapping[str, Sequence[float]], labels: Labels) -> Any:
    """Draw the CDF of the interference ratio of started tasks; the legend has the tails above two limits."""
    figure, axes = new_figure()
    for name, values in ratios.items():
        if not values:
            continue
        above = {limit: sum(value > limit for value in values) / len(values) for limit in (1.25, 1.5)}
        label = f"{name}  IR>1.25: {above[1.25]:.1%}, IR>1.5: {above[1.5]:.1%}"
        axes.step(sorted(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
    axes.axvline(1.25, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel(labels("interference ratio (actual / ideal duration)"))
    axes.set_ylabel(labels("share of started tasks"))
    if axes.lines[:-1]:
        axes.legend(loc="lower right", fontsize="small")
    return figure


def slo_rate(summaries: Mapping[str, Sequence[dict[str, Any]]], labels: Labels) -> Any:
    """Draw the mean SLO rate by scenario, with the 95 % confidence interval over seeds."""
    return points(
        {name: [each["slo_rate"] for each in runs] for name, runs in summaries.items()}, "SLO rate", labels
    )


def compute_utilisation(summaries: Mapping[str, Sequence[dict[str, Any]]], labels: Labels) -> Any:
    """Draw the mean over nodes of the compute utilisation, by scenario."""
    return points(
        {
            name: [
                float(np.mean([node["utilization"]["compute"] for node in each["nodes"].values()]))
                for each in runs
            ]
            for name, runs in summaries.items()
        },
        "mean compute utilisation",
        labels,
    )


def drop_rate(summaries: Mapping[str, Sequence[dict[str, Any]]], labels: Labels) -> Any:
    """Draw the fraction of tasks that did not complete, stacked by reason."""
    reasons = dict(
        zip(STATES[1:], ("dropped past 1.5 deadlines", "cut off by the end", "never started"), strict=True)
    )
    shares = {
        text: [
            float(np.mean([each["states"][state] / max(1, each["tasks"]) for each in runs]))
            for runs in summaries.values()
        ]
        for state, text in reasons.items()
    }
    return stacked(list(summaries), shares, "share of tasks", labels)


def limiter_events(summaries: Mapping[str, Sequence[dict[str, Any]]], labels: Labels) -> Any:
    """Draw the limiter events (a gate cuts a task in a tick), mean over seeds, stacked by gate."""
    counts = {
        f"{gate} gate": [
            float(np.mean([each["limiter_events"][gate] for each in runs])) for runs in summaries.values()
        ]
        for gate in GATES
    }
    return stacked(list(summaries), counts, "limiter events per run", labels)


def points(values: Mapping[str, Sequence[float | None]], title: str, labels: Labels) -> Any:
    """Draw one point per scenario, with its confidence interval."""
    figure, axes = new_figure()
    spreads = {name: over_seeds(each) for name, each in values.items()}
    shown = {name: spread for name, spread in spreads.items() if spread["mean"] is not None}
    means = [spread["mean"] or 0.0 for spread in shown.values()]
    halves = [(spread["high"] or mean) - mean for spread, mean in zip(shown.values(), means, strict=True)]
    axes.errorbar(list(shown), means, yerr=halves, marker="o", capsize=4, color="#4f81bd")
    axes.set_ylim(0, 1)
    axes.set_xlabel(labels("scenario"))
    axes.set_ylabel(labels(title))
    return figure


def stacked(names: list[str], parts: Mapping[str, list[float]], title: str, labels: Labels) -> Any:
    """Draw one stacked bar per scenario."""
    figure, axes = new_figure()
    below = np.zeros(len(names))
    for text, values in parts.items():
        axes.bar(names, values, bottom=below, label=labels(text))
        below += np.array(values)
    axes.set_xlabel(labels("scenario"))
    axes.set_ylabel(labels(title))
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def new_figure() -> tuple[Any, Any]:
    """Return a figure that pyplot does not keep open, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    return figure, figure.subplots()
