"""Progress of a long run: reported to a callback, and shown as a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], object]
"""Callback that receives, during a run, how much is done and how much there is in total."""


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Yield a callback that draws a bar with rate and time left on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[rate]}"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:,.3g}/s" if speed else "")

        yield update
