"""Pages escape what they are given, follow the theme, and repeat no id; equal curves are drawn once."""

from __future__ import annotations

import re
from pathlib import Path

from simulator.present import palette
from simulator.present.figures import (
    Bar,
    draw_gantt,
    draw_lines,
    draw_sweep,
    drawing,
    lanes,
    new_figure,
    picture,
    same_together,
    save_png,
)
from simulator.present.page import Page, Section, render
from simulator.present.tables import Column, Table


def test_a_page_escapes_names_and_starts_with_the_verdict() -> None:
    table = Table([Column("<b>", "text"), Column("jobs")], [["a & b", 3]], note="<i>")
    html = render(Page("x < y", ["No <difference>."], [Section("Figures", tables=[table])]))
    assert "<b>" not in html
    assert "<i>" not in html
    assert "a &amp; b" in html
    assert html.index("No &lt;difference&gt;.") < html.index("<table>")


def test_figures_take_the_colours_of_the_page_and_share_no_ids() -> None:
    with drawing():
        pictures = []
        for title in ("one", "two"):
            figure, axes = new_figure()
            draw_lines(axes, {"a": [([0, 1], [0, 1])], "$b$": [([0, 1], [1, 0])]})
            pictures.append(picture(title, figure))
    html = render(Page("t", [], [Section("s", pictures=pictures)]))
    ids = re.findall(r' id="([^"]+)"', html)
    assert ids
    assert len(ids) == len(set(ids))
    assert "stroke: var(--series-1)" in html
    drawn = html[html.index("<svg") :]
    assert not [colour for colour in palette.VARIABLES if colour in drawn]
    assert "$b$" in drawn


def test_a_sweep_is_drawn_in_the_order_of_its_values() -> None:
    with drawing():
        _, axes = new_figure()
        draw_sweep(axes, "jobs", {20: {"a": 2}, 5: {"a": 0}, 10: {"a": 1}}, "mean")
    (line,) = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([5, 10, 20], [0, 1, 2])


def test_equal_curves_are_drawn_once_and_named_together() -> None:
    curve = [([0.0, 1.0], [1.0, 2.0])]
    with drawing():
        figure, axes = new_figure()
        draw_lines(axes, {"fifo": curve, "priority": curve, "random": [([0.0, 1.0], [2.0, 1.0])]})
        assert [line.get_label() for line in axes.lines] == ["fifo = priority", "random"]
        assert [text.get_text() for text in figure.legends[0].texts] == ["fifo = priority", "random"]
    assert same_together({"a": 1, "b": 2, "c": 1}) == {"a = c": 1, "b": 2}


def test_no_two_of_many_series_look_alike() -> None:
    styles = [tuple(palette.style_of(place).values()) for place in range(28)]
    assert len(set(styles)) == 28


def test_spans_of_one_lane_do_not_overlap_and_lanes_are_few() -> None:
    spans = [(0.0, 5.0), (1.0, 2.0), (2.0, 3.0), (4.0, 6.0), (5.0, 7.0)]
    assert lanes(spans) == [0, 1, 1, 1, 0]
    assert lanes([(0, 4), (5, 6), (1, 5), (2, 3), (3, 9)]) == [0, 0, 1, 2, 2]


def test_a_gantt_chart_is_written_as_a_file(tmp_path: Path) -> None:
    with drawing():
        figure, axes = new_figure()
        draw_gantt(axes, [Bar("n0", 0, 2, "job"), Bar("n0", 1, 3, None)], ["n0", "n1"])
        assert [label.get_text() for label in axes.get_yticklabels()] == ["n0", "n1"]
        save_png(figure, tmp_path / "gantt.png")
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
