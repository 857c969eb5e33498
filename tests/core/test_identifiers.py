"""Names and texts that callers give: what could forge a line of a log is refused, all else is kept."""

from __future__ import annotations

import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.identifiers import (
    JOINERS,
    MAX_TEXT,
    UNPRINTABLE,
    as_reason,
    check_names,
    check_text,
)
from resource_manager.errors import InvalidRequestError

FORGING = (
    *("\n", "\r", "\x00", "\x1b[31m", "\x7f", "\x9b", "\u00a0", "\u00ad", "\u200b", "\u202e", "\u2028"),
    *("\u2066", "\u3164", "\ufe0f", "\ufeff", "\ud800", "\U000e0041"),
)
HARMLESS = ("", "train/1", "名前", "é ñ", "🚀", "{x} <b> ' \"", "می\u200cخواهم", "क्\u200dष")
JOINED_WRONGLY = ("a\u200cb", "\u200cخ", "خ\u200c", "a\u200d", "👩\u200d🔬")


@pytest.mark.parametrize("text", [*FORGING, *JOINED_WRONGLY], ids=ascii)
def test_a_character_that_could_forge_output_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_names({"team": ["ok"], "lease_id": ["fine", f"é{text}"]})
    assert caught.value.field == "lease_id"
    message = str(caught.value)
    assert message.startswith("lease_id has a control or an invisible character: '\\xe9")
    assert message.isascii(), "the message itself must not forge anything"
    assert message.isprintable()


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_accepted(text: str) -> None:
    check_names({"lease_id": [text]})
    check_text(reason=text)


@pytest.mark.parametrize("blank", [" ", "   ", "\u2800", " \u2800 "], ids=ascii)
def test_a_name_is_not_blank_but_a_reason_may_be(blank: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^owner has nothing but spaces: '") as caught:
        check_names({"owner": [blank]})
    assert caught.value.field == "owner"
    check_names({"owner": [f"a{blank}b"]})
    check_text(reason=blank)


def test_a_long_wrong_text_is_shown_in_part() -> None:
    for wrong in ("x" * 5_000 + "\n", " " * 5_000):
        with pytest.raises(InvalidRequestError) as caught:
            check_names({"owner": [wrong]})
        assert len(str(caught.value)) < 300


def test_a_reason_has_a_longest_length() -> None:
    check_text(reason="n" * MAX_TEXT, outcome="n" * MAX_TEXT)
    with pytest.raises(InvalidRequestError, match=r"^outcome may have 250 characters, got 251$") as caught:
        check_text(reason="short", outcome="n" * (MAX_TEXT + 1))
    assert caught.value.field == "outcome"


def test_every_control_and_format_character_and_every_odd_space_is_refused() -> None:
    """By this Python's own tables, which may be older than the module's but know nothing that it forgot."""
    refused = re.compile(f"[{UNPRINTABLE}{JOINERS}]")
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if unicodedata.category(character) in {"Cc", "Cf", "Co", "Zl", "Zp", "Zs"} and character != " ":
            assert refused.match(character), hex(code)


@given(st.text(st.characters(exclude_characters=JOINERS, exclude_categories=["Cs"]), max_size=20))
def test_the_class_for_schemas_refuses_what_the_check_refuses(text: str) -> None:
    """The REST service publishes `UNPRINTABLE` in its schema; joiners and surrogates have no place there."""
    try:
        check_text(reason=text)
    except InvalidRequestError:
        assert re.search(f"[{UNPRINTABLE}]", text)
    else:
        assert not re.search(f"[{UNPRINTABLE}]", text)


@given(st.text(max_size=600))
def test_any_text_from_outside_can_be_a_reason(text: str) -> None:
    """An error of a server must not keep a lease from its release, whatever it says."""
    check_text(reason=as_reason(text))
