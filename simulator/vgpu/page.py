"""Tables and pages of a comparison of scenarios, in English or Chinese."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

from simulator.present.figures import Picture, same_together
from simulator.present.page import Page, Section, render
from simulator.present.tables import Cell, Column, Spread, Table
from simulator.present.units import share
from simulator.stats import is_interval_above
from simulator.vgpu.results import GATES, SHORT_DIMENSIONS

Collected = Mapping[str, Mapping[str, Any]]
"""Scenario -> its `metrics.collect`."""
Swept = Mapping[str, Mapping[float, Collected]]
"""Axis of a sweep -> its value -> the scenarios there."""

Pick = Callable[[Iterable[float]], float]
Rows = list[list[Cell]]

LANGUAGES = ("en", "zh")

FIGURES: dict[str, tuple[Literal["number", "share"], int, tuple[str, str]]] = {
    "ir_mean": ("number", 3, ("IR mean", "IR 均值")),
    "ir_p95": ("number", 3, ("IR p95", "IR p95")),
    "ir_p99": ("number", 3, ("IR p99", "IR p99")),
    "ir_over_1_25": ("share", 2, ("IR > 1.25", "IR > 1.25")),
    "ir_over_1_5": ("share", 2, ("IR > 1.5", "IR > 1.5")),
    "ir_over_2": ("share", 2, ("IR > 2", "IR > 2")),
    "ir_finished_over_1_25": ("share", 2, ("IR > 1.25, finished", "IR > 1.25（已完成）")),
    "slowdown_p95": ("number", 2, ("slowdown p95", "减速比 p95")),
    "started": ("number", 1, ("tasks started", "已启动任务")),
    "slo_rate": ("share", 1, ("SLO rate", "SLO 满足率")),
    "slo_violations": ("number", 1, ("SLO violations", "SLO 违约任务")),
    "drop_rate": ("share", 1, ("drop rate", "丢弃率")),
    "drop_count": ("number", 1, ("tasks dropped", "丢弃任务")),
    "duration_p95_s": ("number", 1, ("duration p95 of started tasks, s", "时长 p95（已启动任务，秒）")),
    "duration_all_p95_s": ("number", 1, ("duration p95 of all tasks, s", "时长 p95（全部任务，秒）")),
    "limited_tasks": ("number", 1, ("limited tasks", "被限流任务")),
}
"""Name of a collected figure -> its kind, decimals and headings in both languages."""
INTERFERENCE, SERVICE = list(FIGURES)[:8], list(FIGURES)[8:]
SWEPT = ("ir_over_1_25", "slo_rate", "drop_rate")
"""Figures shown over a sweep."""
PICTURES = {
    "ir_cdf": ("How much longer tasks run than alone", "任务相对理想时长的倍数"),
    "slo_rate": ("Tasks that meet their deadline", "满足期限的任务"),
    "drop_rate": ("Tasks that did not complete", "未完成的任务"),
    "compute_util": ("Compute in use", "算力利用率"),
    "limiter_events": ("Interventions of the sandbox", "沙盒限流"),
}
"""Name of a figure -> its title in both languages."""

TEXTS = {
    "title": ("vGPU pool with API sandbox: comparison of scenarios", "带 API 沙盒的 vGPU 池：场景对比"),
    "other": ("中文", "English"),
    "seeds": ("Seeds", "随机种子"),
    "note": (
        "Means over seeds; ± is the half width of the 95 % confidence interval (Student's t). IR"
        " (interference ratio) is actual over ideal duration from start to end, over all tasks that started;"
        " “finished” takes completed tasks only; slowdown counts the wait in the queue too. Durations of all"
        " tasks count those that never started from their arrival to the end of the run, as the public"
        " simulator does.",
        "各种子的均值；± 为 95 % 置信区间的半宽（Student t）。"
        "IR（干扰率）为从启动到结束的实际时长与理想时长之比，"
        "统计所有已启动的任务；“已完成”仅统计完成的任务；减速比还计入排队时间。"
        "“全部任务”的时长把从未启动的任务按到达至仿真结束计入，与公开的模拟器相同。",
    ),
    "scenario": ("scenario", "场景"),
    "about": ("what it is", "说明"),
    "scenarios": ("Scenarios", "场景"),
    "quality": ("Service", "服务质量"),
    "events": ("Limiter events per run", "每次运行的限流次数"),
    "memory": ("memory", "显存"),
    "bandwidth": ("bandwidth", "带宽"),
    "compute": ("compute", "算力"),
    "utilisation": ("Mean utilisation by node", "各节点平均利用率"),
    "histograms": ("Tasks by interference ratio", "按干扰率统计的任务数"),
    "sweep": ("Over {axis}", "随 {axis} 变化"),
    "alone": (
        "{name}: {ir} of the tasks that started take more than 1.25 times their ideal time;"
        " {slo} of all tasks meet their deadline, {drop} are dropped.",
        "{name}：{ir} 的已启动任务耗时超过理想时长的 1.25 倍；{slo} 的任务满足期限，{drop} 被丢弃。",
    ),
    "ir_best": (
        "Isolation is best in {best}: {good} of started tasks take more than 1.25 times their ideal time,"
        " {bad} in {worst}.",
        "{best} 的隔离最好：{good} 的已启动任务耗时超过理想时长的 1.25 倍，{worst} 为 {bad}。",
    ),
    "ir_better": (
        "{best} isolates better than {worst}: {good} of started tasks take more than 1.25 times their ideal"
        " time, {bad} there; the confidence intervals of others overlap with one of these.",
        "{best} 的隔离优于 {worst}：{good} 的已启动任务耗时超过理想时长的 1.25 倍，后者为 {bad}；"
        "与其他场景的置信区间重叠。",
    ),
    "ir_equal": (
        "The scenarios isolate alike: {good} of started tasks take more than 1.25 times their ideal time.",
        "各场景隔离效果相同：{good} 的已启动任务耗时超过理想时长的 1.25 倍。",
    ),
    "slo_best": (
        "Most tasks meet their deadline in {best} ({good}), fewest in {worst} ({bad}).",
        "满足期限的任务在 {best} 最多（{good}），在 {worst} 最少（{bad}）。",
    ),
    "slo_better": (
        "More tasks meet their deadline in {best} ({good}) than in {worst} ({bad}); the confidence"
        " intervals of others overlap with one of these.",
        "满足期限的任务在 {best}（{good}）多于 {worst}（{bad}）；与其他场景的置信区间重叠。",
    ),
    "ir_overlap": (
        "No scenario isolates better: {good} to {bad} of started tasks take more than 1.25 times their ideal"
        " time, and the confidence intervals overlap.",
        "没有场景隔离更好：{good} 到 {bad} 的已启动任务耗时超过理想时长的 1.25 倍，置信区间重叠。",
    ),
    "slo_overlap": (
        "No scenario meets more deadlines: {bad} to {good}, and the confidence intervals overlap.",
        "没有场景满足更多期限：{bad} 到 {good}，置信区间重叠。",
    ),
    "slo_equal": ("The scenarios meet as many deadlines: {good}.", "各场景满足期限的任务一样多：{good}。"),
    "changes": (
        "From {axis} {first} to {last} the SLO rate goes: {changes}.",
        "{axis} 从 {first} 到 {last}，SLO 满足率：{changes}。",
    ),
    "changes_nothing": (
        "From {axis} {first} to {last} the SLO rate does not change.",
        "{axis} 从 {first} 到 {last}，SLO 满足率不变。",
    ),
    "unlike": (
        "The scenarios have tasks, arrivals or lengths of their own; give --tasks, --arrival and --duration"
        " to compare them under one load.",
        "各场景的任务数、到达方式或时长不同；用 --tasks、--arrival、--duration 在同一负载下比较。",
    ),
}


def text(key: str, language: str) -> str:
    """Return a text of the page in that language."""
    return TEXTS[key][LANGUAGES.index(language)]


def render_page(
    language: str,
    collected: Collected,
    swept: Swept,
    titles: Mapping[str, tuple[str, str]],
    seeds: Sequence[int],
    pictures: Mapping[str, Picture],
    same_load: bool,
) -> str:
    """Return the page as HTML; `titles` are those of the scenarios in both languages."""
    at = LANGUAGES.index(language)
    name = Column(text("scenario", language), "text")
    gates = [Column(text(gate, language), digits=0) for gate in GATES]
    dimensions = [Column(text(dimension, language), "share") for dimension in SHORT_DIMENSIONS]
    about: Rows = [[each, both[at] or both[0]] for each, both in titles.items()]
    spreads = {each: figures["confidence"] for each, figures in collected.items()}
    events: Rows = [
        [each, *(fmean(figures["limiter_events"][gate]) for gate in GATES)]
        for each, figures in collected.items()
    ]
    use: Rows = [
        [f"{each}, {node}", *(amounts[dimension] for dimension in SHORT_DIMENSIONS)]
        for each, figures in collected.items()
        for node, amounts in figures["utilization"].items()
    ]
    sections = [
        Section(
            text("scenarios", language),
            tables=[Table([name, Column(text("about", language), "text")], about)],
        ),
        Section(
            text("quality", language),
            text("note", language),
            [figures_table(collected, keys, language) for keys in (INTERFERENCE, SERVICE)],
            [replace(pictures[key], title=titles[at]) for key, titles in PICTURES.items()],
        ),
        *(
            Section(
                text("sweep", language).format(axis=axis),
                tables=sweep_tables(points, language),
                pictures=[
                    replace(pictures[f"sweep_{axis}_{key}"], title=FIGURES[key][2][at]) for key in SWEPT
                ],
            )
            for axis, points in swept.items()
        ),
        Section(text("events", language), tables=[Table([name, *gates], events)]),
        Section(text("utilisation", language), tables=[Table([name, *dimensions], use)]),
        Section(
            text("histograms", language),
            pictures=[
                replace(pictures[f"{_first(collected, figures)}_ir_hist"], title=names)
                for names, figures in same_together(spreads).items()
            ],
        ),
    ]
    other = "comparison.html" if language == "zh" else "comparison.zh.html"
    links = {text("other", language): other, **{f"{k}_report.json": f"{k}_report.json" for k in collected}}
    lines = verdict(collected, swept, same_load, language)
    about_seeds = f"{text('seeds', language)}: {ranges(seeds)}"
    return render(Page(text("title", language), lines, sections, about_seeds, links, language))


def _first(collected: Collected, figures: Any) -> str:
    return next(name for name, each in collected.items() if each["confidence"] == figures)


def verdict(collected: Collected, swept: Swept, same_load: bool = True, language: str = "en") -> list[str]:
    """Return sentences on interference, deadlines and what each sweep changes; equal scenarios named once.

    `same_load` is false where the scenarios differ in tasks, arrivals or length.
    """
    groups = same_together({name: each["confidence"] for name, each in collected.items()})
    means = {name: {key: each[key]["mean"] for key in SWEPT} for name, each in groups.items()}
    known = {name: each for name, each in means.items() if None not in each.values()}
    lines = []
    if len(known) == 1:
        ((name, alone),) = known.items()
        ir, slo, drop = (share(alone[key]) for key in SWEPT)
        lines.append(text("alone", language).format(name=name, ir=ir, slo=slo, drop=drop))
    elif known:
        lines += [
            _contrast("ir", {name: groups[name]["ir_over_1_25"] for name in known}, min, max, language),
            _contrast("slo", {name: groups[name]["slo_rate"] for name in known}, max, min, language),
        ]
        if not same_load:
            lines.append(text("unlike", language))
    for axis, points in swept.items():
        rates = {
            name: [share(each[name]["confidence"]["slo_rate"]["mean"] or 0.0) for each in points.values()]
            for name in collected
        }
        changed = [
            f"{name} {each[0]} → {each[-1]}"
            for name, each in same_together(rates).items()
            if len(set(each)) > 1
        ]
        key = "changes" if changed else "changes_nothing"
        first, *_, last = (f"{value:g}" for value in [*points, *points])
        lines.append(
            text(key, language).format(axis=axis, first=first, last=last, changes=", ".join(changed))
        )
    return lines


def _contrast(
    sentence: str, spreads: Mapping[str, Mapping[str, Any]], best: Pick, worst: Pick, language: str
) -> str:
    """Return the sentence on all scenarios that, as shown, are best and worst, or on their being equal.

    One that is best or worst has a confidence interval that overlaps with no other's; where the two ends are
    apart and one of them is not, only these two are compared.
    """
    values = {name: each["mean"] for name, each in spreads.items()}
    good, bad = share(best(values.values())), share(worst(values.values()))
    names = {
        shown: [name for name, value in values.items() if share(value) == shown] for shown in (good, bad)
    }
    if good == bad:
        key = "equal"
    elif any(_overlap(spreads[one], spreads[other]) for one in names[good] for other in names[bad]):
        key = "overlap"
    else:
        rest = [each for name, each in spreads.items() if name not in names[good] + names[bad]]
        is_clear = not any(_overlap(spreads[end], each) for each in rest for end in names[good] + names[bad])
        key = "best" if is_clear else "better"
    best_names, worst_names = (", ".join(names[shown]) for shown in (good, bad))
    return text(f"{sentence}_{key}", language).format(best=best_names, worst=worst_names, good=good, bad=bad)


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two confidence intervals overlap; single runs have none."""
    return not (is_interval_above(one, other) or is_interval_above(other, one))


def figures_table(collected: Collected, keys: Collection[str], language: str = "en", note: str = "") -> Table:
    """Return a row per scenario with the means of those figures and their confidence."""
    at = LANGUAGES.index(language)
    columns = [Column(titles[at], kind, digits) for kind, digits, titles in map(FIGURES.__getitem__, keys)]
    rows: Rows = [
        [name, *(spread(each["confidence"][key]) for key in keys)] for name, each in collected.items()
    ]
    return Table([Column(text("scenario", language), "text"), *columns], rows, note=note)


def sweep_tables(points: Mapping[float, Collected], language: str = "en", axis: str = "") -> list[Table]:
    """Return a table per figure of `SWEPT`: a row per scenario, a column per value of the axis."""
    name = Column(text("scenario", language), "text")
    columns = [name, *(Column(f"{value:g}", "share", 2) for value in points)]
    tables = []
    for key in SWEPT:
        rows: Rows = [
            [scenario, *(spread(each[scenario]["confidence"][key]) for each in points.values())]
            for scenario in next(iter(points.values()))
        ]
        title = FIGURES[key][2][LANGUAGES.index(language)]
        tables.append(Table(columns, rows, f"{title} by {axis}" if axis else title))
    return tables


def spread(of: Mapping[str, float | None]) -> Spread:
    """Return the mean over seeds with the half width of its interval, from `metrics.over_seeds`."""
    mean, high = of["mean"], of["high"]
    return Spread(mean, None if mean is None or high is None else high - mean)


def ranges(seeds: Sequence[int]) -> str:
    """Format the seeds as ranges: 1-20, 25."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1][1:] = [seed]
        else:
            parts.append([seed])
    return ", ".join("-".join(str(end) for end in part) for part in parts)
