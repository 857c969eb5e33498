"""Checks of names and texts that callers give: they appear in logs, terminals and pages."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping

from resource_manager.errors import InvalidRequestError
from resource_manager.words import Words

MAX_TEXT = 250
"""The most characters of a reason or an outcome, which stay in the history."""

_REFUSED = (
    "00-1f 7f-a0 ad-ad 34f-34f 600-605 61c-61c 6dd-6dd 70f-70f 890-891 8e2-8e2 115f-1160 1680-1680 17b4-17b5 "
    "180b-180f 2000-200b 200e-200f 2028-202f 205f-206f 3000-3000 3164-3164 e000-f8ff fe00-fe0f feff-feff "
    "ffa0-ffa0 fff0-fffb 110bd-110bd 110cd-110cd 13430-1343f 1bca0-1bca3 1d173-1d17a e0000-10ffff"
)
"""Characters of the categories Cc, Cf, Co, Zl, Zp and Zs, and Default_Ignorable_Code_Points (Unicode 16), but
for the space and for `JOINERS`."""

JOINERS = "\u200c\u200d"
"""ZWNJ and ZWJ, invisible too, without which some scripts cannot be written."""

_JOINED = (
    "\u0620-\u08ff"  # Arabic, Syriac, N'Ko, Mandaic
    "\u0900-\u0dff"  # from Devanagari to Sinhala
    "\u1000-\u109f\u1780-\u17ff\u1800-\u18af"  # Myanmar, Khmer, Mongolian
)


UNPRINTABLE = re.sub(
    "[0-9a-f]+", lambda code: f"\\u{code[0]:0>4}" if len(code[0]) < 5 else chr(int(code[0], 16)), _REFUSED
).replace(" ", "")
"""Characters that names must not contain, for a regular expression's character class: line ends, terminal
control characters, changes of text direction, invisible characters, and spaces but the common one."""

_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}\ud800-\udfff]")
_JOINER = re.compile(f"[{JOINERS}]")
_WITH_JOINER = re.compile(f"[{_JOINED}]+")
_BLANK = " \u2800"
"""Characters that show nothing: the space, and the empty pattern of Braille."""

BY_HAND = re.compile(r"hand:(?:(.+@[^\s@/]+)|.*)/[0-9a-f]{8}", re.DOTALL)
"""Lease id of `run`, `shell` and `hold`, whose random end nobody wants to read, with `ada@desk` before it.

Behind its last `@` there is none: an id of a thousand of them must not take a million steps. commit.lua knows
what has such an end, too.
"""


def check_names(names: Mapping[str, Iterable[str]]) -> None:
    """Raise `InvalidRequestError`, naming the field, for a blank name or an `UNPRINTABLE` character.

    `names` maps fields to their names. They appear in logs, terminals and pages, where such characters could
    forge other output, or make two names look the same.
    """
    for field_name, texts in names.items():
        for text in texts:
            _check_printable(field_name, text)
            if text and not text.strip(_BLANK):
                name = Words.parameter(field_name)
                raise InvalidRequestError("{} has nothing but spaces: {!a}", name, text[:200])


def _check_printable(field_name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError("{} must be a text, got {!a:.100}", Words.parameter(field_name), text)
    if text.isascii() and text.isprintable():
        return
    if _UNPRINTABLE.search(text) or not all(_joins(text, found.start()) for found in _JOINER.finditer(text)):
        name = Words.parameter(field_name)
        raise InvalidRequestError("{} has a control or an invisible character: {!a}", name, text[:200])


def _joins(text: str, place: int) -> bool:
    """Return whether the joiner at this place stands between letters of a script that needs it."""
    around = text[place - 1 : place] + text[place + 1 : place + 2]
    if len(around) < 2 or _WITH_JOINER.fullmatch(around) is None:
        return False
    before, after = map(unicodedata.category, around)
    return before[0] in "LM" and after[0] == "L"


def check_text(**texts: str) -> None:
    """Raise `InvalidRequestError` for a reason or an outcome that is too long or cannot be printed."""
    for field_name, text in texts.items():
        _check_printable(field_name, text)
        if len(text) > MAX_TEXT:
            name = Words.parameter(field_name)
            raise InvalidRequestError("{} may have {} characters, got {:,}", name, MAX_TEXT, len(text))


def as_reason(text: object) -> str:
    """Return a text from outside, such as an error of a server, as a reason that `check_text` takes."""
    line = " ".join(_UNPRINTABLE.sub("?", " ".join(str(text).split())).split())
    line = _JOINER.sub("?", line)
    half = MAX_TEXT // 2 - 1
    return line if len(line) <= MAX_TEXT else f"{line[:half]}…{line[-half:]}"


def job_key(lease_id: str, fencing_token: int, rank: int = 0, nodes: int = 1) -> str:
    """Return the name of the job of a lease's member: readable, safe as a file or container name, unique.

    `rank` is that of the member among so many `nodes`.
    """
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", lease_id).strip("-.")[-60:].lstrip("-.")
    digest = hashlib.sha256(lease_id.encode()).hexdigest()[:8]
    return f"gpu-{readable}-{digest}-{job_number(fencing_token, rank, nodes)}"


def job_number(fencing_token: int, rank: int, nodes: int) -> str:
    """Return the number at the end of the name of a member's job: one of one server has no rank there."""
    return f"{fencing_token}" if nodes == 1 else f"{fencing_token}.{rank}"


def number_of_key(key: str) -> str:
    """Return the number at the end of the name of a member's job, empty for another name."""
    found = re.search(r"-(\d+(?:\.\d+)?)$", key)
    return found[1] if found else ""


def token_of_key(key: str) -> int:
    """Return the fencing token in the name of a lease's job, -1 for another name."""
    return int(number_of_key(key).partition(".")[0] or -1)
