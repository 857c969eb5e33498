"""A report as one self-contained HTML page: verdict first, then tables and figures, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from simulator.present import palette
from simulator.present.figures import Picture
from simulator.present.tables import Table

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page under a heading."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """Report for a browser; the first sentence of the verdict is what a reader should take away."""

    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    about: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    """Text of a link -> its address."""
    language: str = "en"


def render(page: Page) -> str:
    """Return the page as HTML."""
    return _template().render(page=page, palette=palette.css()) + "\n"


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("simulator.present", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")
