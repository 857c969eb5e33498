"""Figures drawn with matplotlib, each file written as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.io.files import write_atomically


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plain(name: str) -> str:
    """Return the name with its dollar signs escaped: matplotlib reads text between two as a formula."""
    return name.replace("$", r"\$")


def save_figure(figure: Any, path: Path) -> None:
    """Save a matplotlib figure, as a whole or not at all, and close it."""
    from matplotlib import pyplot

    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=120, bbox_inches="tight"))
    pyplot.close(figure)
