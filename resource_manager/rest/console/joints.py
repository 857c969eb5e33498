"""Names that browsers may break between their words."""

from __future__ import annotations

import re

from markupsafe import Markup

JOINT = re.compile(r"(?<=[._/])")
"""Places at which a name may be broken into lines."""


def joints(name: str) -> Markup:
    """Return the name as HTML that breaks between its words, and nowhere else if a line has room for them."""
    return Markup("<wbr>").join(JOINT.split(name))
