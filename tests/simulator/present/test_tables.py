"""Tables keep every cell whole, whatever the width, and choose units that suit a column."""

from __future__ import annotations

import pytest

from simulator.present.tables import Column, Spread, Table, print_tables
from simulator.present.units import duration, number, share, time_unit

WIDE = Table(
    [Column("policy", "text"), *(Column(f"figure {place}") for place in range(12))],
    [["best_fit under first come, first served", *range(1_000_000, 1_000_012)]],
)


def test_a_piped_table_is_one_line_a_row_however_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_tables(WIDE)
    row = next(line for line in capsys.readouterr().out.splitlines() if "best_fit" in line)
    assert all(f"{value:,}" in row for value in range(1_000_000, 1_000_012))
    assert "…" not in row


def test_a_table_wider_than_the_terminal_comes_in_parts_with_the_names_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_tables(WIDE)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("best_fit under first come, first served") > 1
    assert all(f"{value:,}" in out for value in range(1_000_000, 1_000_012))


def test_a_column_of_times_has_one_unit_which_suits_its_longest() -> None:
    table = Table(
        [Column("order", "text"), Column("wait", "time")], [["a", 5400.0], ["b", 90_000], ["c", None]]
    )
    assert table.heads() == ["order", "wait, hours"]
    assert table.texts() == [["a", "1.5"], ["b", "25"], ["c", "–"]]


def test_a_spread_shows_its_half_width_in_the_unit_of_the_column() -> None:
    columns = [Column("name", "text"), Column("rate", "share"), Column("wait", "time")]
    table = Table(columns, [["a", Spread(0.5, 0.013), Spread(7200.0, 360.0)], ["b", Spread(None), None]])
    assert table.texts() == [["a", "50.0 ± 1.3 %", "2 ± 0.1"], ["b", "–", "–"]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00002, "20 µs"),
        (0.25, "250 ms"),
        (1.5, "1.5 s"),
        (119, "119 s"),
        (300, "5 minutes"),
        (5400, "90 minutes"),
        (9000, "2.5 hours"),
        (172_800, "2 days"),
    ],
)
def test_a_length_of_time_has_a_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_are_short_and_exact_where_small() -> None:
    assert [number(value) for value in (1234567, 1234.5, 2.0, 0.0123456, 0.0)] == [
        "1,234,567",
        "1,234.5",
        "2",
        "0.0123",
        "0",
    ]
    assert share(0.0512, 2) == "5.12 %"
    assert time_unit(0).name == "s"
