"""The fuzzed parsers, a moment each: mutated real examples, and plain bytes. `make fuzz` goes deeper."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.parser import check
from tests.fuzz.parsers import parsers

ROUNDS = 60
PIECES = (
    *(b"0", b"-1", b"1e309", b"nan", b"9" * 25, b"9" * 5000, b"null", b'""', b"{}", b"[]", b"\0", b"\xff"),
    *(b"\n", b",", b'"', b"'", b"[" * 2000, b'{"a":' * 2000, "\ufeff".encode(), b"\\ud800", b"true", b"\t"),
)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """One to four small damages: a piece put in, taken out, doubled or replaced; sometimes a number's."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        length = min(draw.choice((1, 1, 2, 4, 16, 64)), len(data) - at)
        match draw.randrange(5):
            case 0:
                data = data[:at] + draw.choice(PIECES) + data[at:]
            case 1:
                data = data[:at] + data[at + length :]
            case 2:
                data = data[:at] + data[at : at + length] * 3 + data[at + length :]
            case 3:
                data = data[:at] + draw.choice(PIECES) + data[at + length :]
            case _:
                digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
                if digits:
                    at = draw.choice(digits)
                    data = data[:at] + draw.choice(PIECES[:8]) + data[at + 1 :]
    return data


@pytest.mark.parametrize("name", sorted(parsers()))
@pytest.mark.timeout(60)
def test_a_damaged_file_is_an_error_in_one_line(name: str) -> None:
    parser = parsers()[name]
    for number in range(ROUNDS):
        draw = random.Random(f"{name}-{number}")
        data = mutate(draw.choice(parser.examples), draw) if number % 10 else draw.randbytes(number)
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(parser, data, Path(folder))
            except Exception as error:
                raise AssertionError(f"{name}, example {number}: {data[:300]!r}") from error


@pytest.mark.parametrize("name", sorted(parsers()))
def test_the_examples_themselves_are_right(name: str, tmp_path: Path) -> None:
    """Else the mutations would all end at the first check. (An instance without jobs is none.)"""
    parser = parsers()[name]
    parser.read(parser.examples[0], tmp_path)
