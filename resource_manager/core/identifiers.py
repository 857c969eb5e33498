"""Checks of names and texts that callers give: they appear in logs, terminals and pages."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resource_manager.errors import InvalidRequestError

MAX_TEXT = 250
"""The most characters of a reason or an outcome, which stay in the history."""

UNPRINTABLE = "\\x00-\\x1f\\x7f-\\x9f\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060\\u2066-\\u2069\\ufeff"
"""Characters that names must not contain, for a regular expression's character class: line ends, terminal
control characters, changes of text direction and invisible characters."""

_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}\ud800-\udfff]")


def check_printable(texts: Mapping[str, str]) -> None:
    """Raise `InvalidRequestError`, naming the field, for a text with an `UNPRINTABLE` character.

    `texts` maps field names to texts. Names and reasons appear in logs, terminals and pages, where such
    characters could forge other output.
    """
    for field_name, text in texts.items():
        if _UNPRINTABLE.search(text):
            raise InvalidRequestError(
                f"{field_name} has a control or an invisible character: {text[:200]!a}", field=field_name
            )


def check_text(**texts: str) -> None:
    """Raise `InvalidRequestError` for a reason or an outcome that is too long or cannot be printed."""
    check_printable(texts)
    for field_name, text in texts.items():
        if len(text) > MAX_TEXT:
            raise InvalidRequestError(
                f"{field_name} may have {MAX_TEXT} characters, got {len(text):,}", field=field_name
            )
