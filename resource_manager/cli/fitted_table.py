"""Tables that fit the terminal: they give up whole columns, the least important first, and never cut ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDE = 100_000
"""Width in which every table fits."""

LEAST_WRAPPED = 24
"""Width to which a column of sentences may shrink before a column is given up."""

BETWEEN = 3
"""Width of what stands between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a `FittedTable`: those with the highest `give_up` go first, those with 0 stay.

    Texts of one that `wraps` take several lines rather than more width.
    """

    name: str
    give_up: int = 0
    wraps: bool = False
    justify: Literal["left", "right"] = "left"


class FittedTable:
    """Table that leaves out columns where the terminal is narrow, and says which."""

    def __init__(self, *columns: Column, title: str = "") -> None:
        self.columns = columns
        self._title = title
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with a cell for each column."""
        self._rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = self._shown(options.max_width)
        table = Table(title=self._title or None)
        for place in shown:
            column = self.columns[place]
            table.add_column(column.name, justify=column.justify, overflow="fold", no_wrap=False)
        widths = self._widths(shown, options.max_width)
        for column_of_table, width in zip(table.columns, widths, strict=True):
            column_of_table.min_width = width
        for row in self._rows:
            table.add_row(*(row[place] for place in shown))
        yield table
        hidden = [column.name for place, column in enumerate(self.columns) if place not in shown]
        if hidden:
            yield Text(f"not shown: {', '.join(hidden)} (--wide or --json)", "dim")

    def _natural(self, place: int) -> int:
        """Return the width of a column in which nothing wraps."""
        cells = (line for row in self._rows for line in row[place].plain.split("\n"))
        return max([len(self.columns[place].name), *(Text(line).cell_len for line in cells)])

    def _least(self, place: int) -> int:
        natural = self._natural(place)
        return min(natural, LEAST_WRAPPED) if self.columns[place].wraps else natural

    def _shown(self, width: int) -> list[int]:
        """Return the places of the columns that fit."""
        shown = list(range(len(self.columns)))
        while sum(self._least(place) + BETWEEN for place in shown) + 1 > width:
            given_up = max(shown, key=lambda place: (self.columns[place].give_up, place))
            if not self.columns[given_up].give_up:
                break  # ids longer than the terminal go on in the next line
            shown.remove(given_up)
        return shown

    def _widths(self, shown: list[int], width: int) -> list[int | None]:
        """Return the least widths: what does not wrap gets all it needs where that fits."""
        if sum(self._least(place) + BETWEEN for place in shown) + 1 > width:
            return [None] * len(shown)
        return [self._least(place) for place in shown]
