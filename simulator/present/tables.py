"""Tables: the same object is printed on a terminal and rendered on a page, and no cell is ever cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from simulator.present.units import NOTHING, SECONDS, TimeUnit, number, share, time_unit

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean over several runs and half the width of its confidence interval (None for one run)."""

    mean: float | None
    half: float | None = None


Cell = str | float | Spread | None


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: text, plain numbers, shares (fractions of one, shown as %) or times (in seconds)."""

    title: str
    kind: Literal["text", "number", "share", "time"] = "number"
    digits: int | None = None
    """Decimals, the same in every row; by default what suits the kind and the value."""


@dataclass(frozen=True, slots=True)
class Table:
    """Table for people; the first column names the row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""

    def heads(self) -> list[str]:
        """Return the column titles; a column of times has its unit."""
        return [
            f"{column.title}, {self._unit(place).name}" if column.kind == "time" else column.title
            for place, column in enumerate(self.columns)
        ]

    def texts(self) -> list[list[str]]:
        """Return the cells as text, row by row."""
        units = [self._unit(place) for place in range(len(self.columns))]
        return [
            [_text(cell, column, unit) for cell, column, unit in zip(row, self.columns, units, strict=True)]
            for row in self.rows
        ]

    def _unit(self, place: int) -> TimeUnit:
        """Return the unit of a column of times: the one that suits its longest."""
        if self.columns[place].kind != "time":
            return SECONDS
        times = [value for row in self.rows if (value := _mean(row[place])) is not None]
        return time_unit(max(map(abs, times), default=0.0))


def _mean(cell: Cell) -> float | None:
    value = cell.mean if isinstance(cell, Spread) else cell
    return None if isinstance(value, str) else value


def _text(cell: Cell, column: Column, unit: TimeUnit) -> str:
    if isinstance(cell, str):
        return cell
    mean = _mean(cell)
    if mean is None:
        return NOTHING
    half = cell.half if isinstance(cell, Spread) else None
    shown = _figure(mean, column, unit)
    return shown if half is None else f"{shown.removesuffix(' %')} ± {_figure(half, column, unit)}"


def _figure(value: float, column: Column, unit: TimeUnit) -> str:
    if column.kind == "share":
        return share(value, 1 if column.digits is None else column.digits)
    scaled = value / unit.seconds if column.kind == "time" else value
    return number(scaled) if column.digits is None else f"{scaled:,.{column.digits}f}"


def print_tables(*tables: Table) -> None:
    """Print the tables on standard output.

    A table wider than the terminal is printed in parts, each with the first column, instead of being cut;
    where the output is no terminal, lines are as long as they need to be.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False)  # a name may look like markup
    for table in tables:
        parts = _parts(table, console.width) if console.is_terminal else [range(1, len(table.columns))]
        for part in parts:
            shape = _shape(table, part)
            widest = Console(width=10_000, markup=False).measure(shape).maximum
            wide = Console(width=max(console.width, widest), markup=False)
            wide.print(shape)
        if table.note:
            console.print(table.note)


def _parts(table: Table, width: int) -> list[range]:
    """Split the columns after the first into as few runs as fit the width, each at least one column."""
    widths = [
        max(map(len, texts)) + 3 for texts in zip(table.heads(), *table.texts(), strict=True)
    ]  # three: the border and a space on both sides
    parts, begin, used = [], 1, widths[0] + 1
    for place in range(1, len(widths)):
        if place > begin and used + widths[place] > width:
            parts.append(range(begin, place))
            begin, used = place, widths[0] + 1
        used += widths[place]
    return [*parts, range(begin, len(widths))]


def _shape(table: Table, part: range) -> RichTable:
    from rich.table import Table as RichTable

    places = [0, *part]
    shape = RichTable(title=table.title or None, title_justify="left")
    heads, texts = table.heads(), table.texts()
    for place in places:
        is_text = table.columns[place].kind == "text"
        shape.add_column(heads[place], justify="left" if is_text else "right", no_wrap=True)
    for row in texts:
        shape.add_row(*(row[place] for place in places))
    return shape
