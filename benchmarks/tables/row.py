"""Benchmarks and the rows of their tables on docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"
DATA = "DATA"
"""Stands for the folder of the public traces in a command."""

PAIRS, PER_S = "{:,.0f} pairs/s", "{:,.0f}/s"
MS, S = "{:,.1f} ms", "{:,.2f} s"
PART, PERCENT = "{:.2f}", "{:.1f} %"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: its text, the path of its value in the figures, a format and the target."""

    label: str
    path: str
    shown: str
    target: str = ""

    def value(self, figures: Mapping[str, Any]) -> str:
        """Return the formatted value, "not measured" where the machine lacked what it needs."""
        found: Any = figures
        for key in self.path.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return NOT_MEASURED if found is None else self.shown.format(found)

    def is_met(self, value: str) -> bool | None:
        """Return whether the formatted value, in the unit of the target, meets it; None if not measured."""
        if value == NOT_MEASURED:
            return None
        measured = _numbers(value)[0]
        limits = _numbers(self.target)
        if self.target.startswith("≤"):
            return measured <= limits[0]
        if self.target.startswith("≥"):
            return measured >= limits[0]
        return limits[0] <= measured <= limits[-1]


class Benchmark:
    """A command that prints JSON, and the table made of it; `name` is that by which it is run."""

    def __init__(self, name: str, title: str, about: str, command: str, *rows: Row) -> None:
        self.name, self.title, self.about, self.command, self.rows = name, title, about, command, rows


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[\d,]*\.?\d+", text)]
