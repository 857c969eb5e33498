"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from simulator.replay.comparison import findings, rows
from simulator.replay.plots import as_images

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: #fff; border-radius: 4px; }
"""


def render(title: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the page: the findings, the table, the figures."""
    table = rows(results)
    columns = list(dict.fromkeys(key for row in table for key in row))
    findings_text = findings(results)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if findings_text:
        parts += ["<h2>Findings</h2><ul>", *(f"<li>{escape(line)}</li>" for line in findings_text), "</ul>"]
    parts.append("<h2>Figures</h2><table><thead><tr>")
    parts += [f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns]
    parts.append("</tr></thead><tbody>")
    for row in table:
        parts.append(
            "<tr>" + "".join(f"<td>{escape(shown(row.get(name)))}</td>" for name in columns) + "</tr>"
        )
    parts.append("</tbody></table>")
    for name, image in as_images(results):
        parts.append(f'<h2>{escape(name)}</h2><img src="{image}" alt="{escape(name)}, by policy and order">')
    return "\n".join([*parts, "</body></html>", ""])


def shown(value: object) -> str:
    """Return a figure formatted for people."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)
