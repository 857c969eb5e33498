"""Report of a scored plan: the score beside the published ones, and a Gantt chart per tier."""

from __future__ import annotations

from pathlib import Path

from simulator.edge.dataset import TIERS, Dataset, Kind
from simulator.edge.published import published_score
from simulator.edge.scorer import UNFINISHED_JCT_S, Score
from simulator.io.files import write_text
from simulator.present.figures import WIDTH, Bar, draw_gantt, drawing, new_figure, picture, save_png
from simulator.present.page import Page, Section, render
from simulator.present.tables import Column, Table
from simulator.present.units import duration, share

TIER_NAMES: dict[Kind, str] = {"Cloud": "host", "BS": "bs", "UE": "ue"}
TITLES: dict[Kind, str] = {"Cloud": "Cloud hosts", "BS": "Base stations", "UE": "User devices"}


def write_report(dataset: Dataset, score: Score, verdict: list[str], table: Table, folder: Path) -> None:
    """Write `report.html`, and `gantt-host.png`, `gantt-bs.png`, `gantt-ue.png` for tiers that ran tasks."""
    pictures = []
    end_s = max((run.end_s for run in score.runs), default=0.0)
    with drawing():
        for kind, name in TIER_NAMES.items():
            runs = [run for run in score.runs if run.device.kind == kind]
            if not runs:
                continue
            devices = {run.device.index: run.device.name for run in runs}
            bars = [
                Bar(
                    run.device.name,
                    run.matched_s,
                    run.end_s,
                    dataset.tasks[run.task_id].job_id if run.completed else None,
                )
                for run in runs
            ]
            figure, axes = new_figure(width=2 * WIDTH)
            draw_gantt(axes, bars, [devices[index] for index in sorted(devices)], end_s)
            pictures.append(picture(TITLES[kind], figure, wide=True))
            save_png(figure, folder / f"gantt-{name}.png")
    sections = [
        Section("Score", tables=[table]),
        Section("Tasks on devices", "Coloured by job; grey: runs that did not complete.", (), pictures),
    ]
    page = Page(f"Cloud, base stations and devices: dataset {dataset.name}", verdict, sections)
    write_text(folder / "report.html", render(page))


def verdict_of(dataset: Dataset, made_by: str, tiers: str, score: Score) -> list[str]:
    """Return the score in words, beside the published one for the same devices, and what had no effect."""
    mean = duration(score.mean_jct_s)
    after = f", after {mean} on average."
    if len(score.end_s) < len(dataset.tasks):  # the rate is rounded
        after = f"; the mean completion time is {mean}, an unfinished job counted as {UNFINISHED_JCT_S:,} s."
    done = f"{share(score.job_rate, 0)} of the jobs are done"
    lines = [f"{made_by} scores {score.score:,.2f} with {tiers}: {done}{after}"]
    published = published_score(dataset.name, tiers)
    if published is not None:
        gain = score.score - published
        lines.append(f"That is {abs(gain):,.2f} {'above' if gain >= 0 else 'below'} the published plan.")
    lines += [f"{count:,} commands had no effect ({reason})." for reason, count in score.failed.items()]
    return lines


def score_table(dataset: Dataset, made_by: str, tiers: str, score: Score) -> Table:
    """Return this score, and the published ones if the dataset is public."""
    columns = [
        Column("plan", "text"),
        Column("devices", "text"),
        Column("score", digits=2),
        Column("jobs done", "share", 0),
        Column("mean job completion time, s", digits=2),
    ]
    rows: list[list[str | float]] = [[made_by, tiers, score.score, score.job_rate, score.mean_jct_s]]
    for used in TIERS:
        published = published_score(dataset.name, used)
        if published is not None:  # they completed every job, so the score determines the mean time
            rows.append(["published", used, published, 1.0, 30_001 - published])
    return Table(columns, rows)
