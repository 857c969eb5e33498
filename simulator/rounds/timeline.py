"""Timeline of a replay in rounds: who had the GPUs of each server, and when."""

from __future__ import annotations

from pathlib import Path

from simulator.present.figures import WIDTH, Bar, draw_gantt, drawing, new_figure, save_png
from simulator.rounds.record import Rounds


def save_timeline(rounds: Rounds, folder: Path) -> None:
    """Write timeline.png: a bar for each time that a job had GPUs of a server, a colour for each job."""
    bars = [
        Bar(server, span.begin, span.end, job.name)
        for job in rounds.jobs
        for span in job.spans
        for server in dict.fromkeys(span.servers)
    ]
    if not bars:
        return
    first = min(bar.begin for bar in bars)
    bars = [Bar(bar.row, bar.begin - first, bar.end - first, bar.group) for bar in bars]
    with drawing():
        figure, axes = new_figure(width=2 * WIDTH)
        draw_gantt(axes, bars, [state.name for state in rounds.leases.cluster.nodes])
        save_png(figure, folder / "timeline.png")
