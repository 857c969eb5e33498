"""One palette for plots and pages: told apart by the colour-blind, readable on white and on black."""

from __future__ import annotations

SERIES = {
    # After Okabe and Ito (2008); the dark theme has lighter shades of the same hues.
    "series-1": ("#0072b2", "#4aa8e0"),
    "series-2": ("#d55e00", "#ff8a3c"),
    "series-3": ("#009e73", "#2cc9a0"),
    "series-4": ("#aa4499", "#e08fd0"),
    "series-5": ("#b8860b", "#e8c33c"),
    "series-6": ("#4d4d9f", "#a9a9f5"),
    "series-7": ("#6b6b6b", "#b5b5b5"),
}
COLOURS = {
    **SERIES,
    "ink": ("#1b1f24", "#e6e8eb"),
    "quiet": ("#5c6670", "#9aa4ae"),
    "rule": ("#d4d9de", "#3a4149"),
    "panel": ("#f4f6f8", "#1d2228"),
    "paper": ("#ffffff", "#12161a"),
    "faded": ("#c9ced4", "#4b535c"),
    "limit": ("#a40020", "#ff6b81"),
}
"""Name of a colour -> (its value in the light theme, in the dark theme)."""

HEAT = "cividis"
"""matplotlib's colour map for quantities, the same to the colour-blind."""

SERIES_COLOURS = [light for light, _ in SERIES.values()]
DASHES = ("-", "--", ":", "-.")


def style_of(place: int) -> dict[str, str]:
    """Return colour and dashes of the series at that place; no two of the first 28 are equal."""
    colours = len(SERIES_COLOURS)
    return {
        "color": SERIES_COLOURS[place % colours],
        "linestyle": DASHES[place // colours % len(DASHES)],
    }


def light(name: str) -> str:
    """Return the value of a colour of the light theme, which figures are drawn in."""
    return COLOURS[name][0]


def css() -> str:
    """Return the colours as custom properties of CSS, for both themes."""
    first, second = (
        ";".join(f"--{name}:{pair[theme]}" for name, pair in COLOURS.items()) for theme in (0, 1)
    )
    return f":root{{{first}}}@media (prefers-color-scheme:dark){{:root{{{second}}}}}"


VARIABLES = {pair[0]: f"var(--{name})" for name, pair in COLOURS.items()}
"""Colour of the light theme -> the custom property that stands for it on a page."""
