"""Names that browsers may break between their words, and that order nothing beside them."""

from __future__ import annotations

import re

from markupsafe import Markup

JOINT = re.compile(r"(?<=[._/])")
"""Places at which a name may be broken into lines."""


def joints(name: str) -> Markup:
    """Return the name as HTML that breaks between its words, and nowhere else if a line has space for them.

    One that is written from right to left turns nothing around that stands beside it.
    """
    return Markup("<bdi>%s</bdi>") % Markup("<wbr>").join(JOINT.split(name))
