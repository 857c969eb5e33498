"""Comparison page: all scenarios in one HTML file, in English or Chinese."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from simulator.vgpu.results import GATES

TEXTS = {
    "en": {
        "title": "vGPU pool with API sandbox: comparison of scenarios",
        "other": '<a href="comparison.zh.html">中文</a>',
        "seeds": "Seeds",
        "note": "Means over seeds; ± is the half width of the 95 % confidence interval (Student's t). IR is"
        " actual over ideal duration from start to end, over all tasks that started; “finished” takes"
        " completed tasks only; slowdown counts the wait in the queue too.",
        "scenario": "Scenario",
        "started": "Tasks started",
        "slo_rate": "SLO rate",
        "drop_rate": "Drop rate",
        "ir_mean": "IR mean",
        "ir_p95": "IR p95",
        "ir_p99": "IR p99",
        "ir_over_1_25": "IR > 1.25",
        "ir_over_1_5": "IR > 1.5",
        "ir_over_2": "IR > 2",
        "ir_finished_over_1_25": "IR > 1.25, finished",
        "slowdown_p95": "Slowdown p95",
        "duration_p95_s": "Duration p95 (s)",
        "limited_tasks": "Limited tasks",
        "events": "Limiter events per run",
        "memory": "memory",
        "bandwidth": "bandwidth",
        "compute": "compute",
        "utilisation": "Mean utilisation by node",
        "node": "Node",
        "figures": "Figures",
        "report": "report",
    },
    "zh": {
        "title": "带 API 沙盒的 vGPU 池：场景对比",
        "other": '<a href="comparison.html">English</a>',
        "seeds": "随机种子",
        "note": "各种子的均值；± 为 95 % 置信区间的半宽（Student t）。"
        "IR（干扰率）为从启动到结束的实际时长与理想时长之比，"
        "统计所有已启动的任务；“已完成”仅统计完成的任务；减速比还计入排队时间。",
        "scenario": "场景",
        "started": "已启动任务",
        "slo_rate": "SLO 满足率",
        "drop_rate": "丢弃率",
        "ir_mean": "IR 均值",
        "ir_p95": "IR p95",
        "ir_p99": "IR p99",
        "ir_over_1_25": "IR > 1.25",
        "ir_over_1_5": "IR > 1.5",
        "ir_over_2": "IR > 2",
        "ir_finished_over_1_25": "IR > 1.25（已完成）",
        "slowdown_p95": "减速比 p95",
        "duration_p95_s": "时长 p95（秒）",
        "limited_tasks": "被限流任务",
        "events": "每次运行的限流次数",
        "memory": "显存",
        "bandwidth": "带宽",
        "compute": "算力",
        "utilisation": "各节点平均利用率",
        "node": "节点",
        "figures": "图表",
        "report": "报告",
    },
}
SHARES = {
    "slo_rate",
    "drop_rate",
    "ir_over_1_25",
    "ir_over_1_5",
    "ir_over_2",
    "ir_finished_over_1_25",
}
COLUMNS = (
    "started",
    "slo_rate",
    "drop_rate",
    "ir_mean",
    "ir_p95",
    "ir_p99",
    "ir_over_1_25",
    "ir_over_1_5",
    "ir_over_2",
    "ir_finished_over_1_25",
    "slowdown_p95",
    "duration_p95_s",
    "limited_tasks",
)
FIGURES = ("ir_cdf", "slo_rate", "compute_util", "drop_rate", "limiter_events")
STYLE = (
    "body{font:15px/1.5 system-ui,'Noto Sans CJK SC','Microsoft YaHei',sans-serif;margin:2rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .6rem;border-bottom:1px solid #ddd;"
    "text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left;white-space:normal}"
    ".wide{overflow-x:auto}img{max-width:100%;width:34rem;margin:.5rem}small{color:#666}"
)


def render_page(
    language: str,
    collected: Mapping[str, Mapping[str, Any]],
    titles: Mapping[str, tuple[str, str]],
    seeds: Sequence[int],
) -> str:
    """Render the page as HTML; `collected` is `metrics.collect` by scenario, figures are files beside it."""
    text = TEXTS[language]
    at = 1 if language == "zh" else 0
    heads = {name: escape(pair[at] or pair[0]) for name, pair in titles.items()}
    rows = [
        [
            f'<b>{escape(name)}</b> {heads[name]} <small><a href="{quote(name)}_report.json">'
            f"{text['report']}</a></small>",
            *(spread_cell(figures["confidence"][key], key in SHARES) for key in COLUMNS),
        ]
        for name, figures in collected.items()
    ]
    events = [
        [
            escape(name),
            *(
                f"{sum(figures['limiter_events'][gate]) / len(figures['limiter_events'][gate]):,.0f}"
                for gate in GATES
            ),
        ]
        for name, figures in collected.items()
    ]
    use = [
        [
            escape(name),
            escape(node),
            *(f"{dimensions[each]:.1%}" for each in ("compute", "memory", "bandwidth")),
        ]
        for name, figures in collected.items()
        for node, dimensions in figures["utilization"].items()
    ]
    pictures = [*FIGURES, *(f"{name}_ir_hist" for name in collected)]
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8">',
            f"<title>{text['title']}</title><style>{STYLE}</style></head><body>",
            f"<h1>{text['title']}</h1><p>{text['other']} · {text['seeds']}: {ranges(seeds)}</p>",
            f"<p>{text['note']}</p>",
            table([text["scenario"], *(text[key] for key in COLUMNS)], rows),
            f"<h2>{text['events']}</h2>",
            table([text["scenario"], *(text[gate] for gate in GATES)], events),
            f"<h2>{text['utilisation']}</h2>",
            table(
                [text[key] for key in ("scenario", "node", "compute", "memory", "bandwidth")],
                use,
            ),
            f"<h2>{text['figures']}</h2>",
            *(f'<img src="{quote(each)}.png" alt="{escape(each)}">' for each in pictures),
            "</body></html>\n",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render an HTML table; the cells are already HTML."""
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def spread_cell(spread: Mapping[str, float | None], is_share: bool) -> str:
    """Format mean ± half width; a dash without a mean."""
    mean, high = spread["mean"], spread["high"]
    if mean is None:
        return "–"
    form = "{:.2%}" if is_share else "{:.3g}"
    return form.format(mean) + ("" if high is None else f" ± {form.format(high - mean)}")


def ranges(seeds: Sequence[int]) -> str:
    """Format the seeds as ranges: 1-20, 25."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1][1:] = [seed]
        else:
            parts.append([seed])
    return ", ".join("-".join(str(end) for end in part) for part in parts)
