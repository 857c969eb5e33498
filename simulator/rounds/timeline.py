"""Timeline of a replay: who had the GPUs of each server, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from resource_manager.core.models import Node
from simulator.present.figures import WIDTH, Bar, draw_gantt, drawing, new_figure, save_png
from simulator.rounds.record import Rounds


def bars_of(rounds: Rounds) -> list[Bar]:
    """Return a bar for each time that a job had GPUs of a server."""
    return [
        Bar(server, span.begin, span.end, job.name)
        for job in rounds.jobs
        for span in job.spans
        for server in dict.fromkeys(span.servers)
    ]


def save_timeline(bars: Sequence[Bar], nodes: Iterable[Node], folder: Path) -> None:
    """Write timeline.png: the bars in rows of all servers that ever existed, a colour for each job."""
    if not bars:
        return
    first = min(bar.begin for bar in bars)
    bars = [Bar(bar.row, bar.begin - first, bar.end - first, bar.group) for bar in bars]
    with drawing():
        figure, axes = new_figure(width=2 * WIDTH)
        draw_gantt(axes, bars, list(dict.fromkeys(node.name for node in nodes)))
        save_png(figure, folder / "timeline.png")
