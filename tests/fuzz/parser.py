"""One parser of data from outside, how to feed it bytes, and what it may do with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resource_manager import ResourceManagerError
from simulator.cli import BadInput


@dataclass(frozen=True, slots=True)
class Parser:
    """`read` gets bytes and an empty folder; it may raise `ResourceManagerError` or `BadInput`."""

    read: Callable[[bytes, Path], object]
    examples: tuple[bytes, ...]


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A parser of one file of that name."""

    def parse(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return parse


def check(parser: Parser, data: bytes, folder: Path) -> None:
    """Feeds the parser; raises whatever it should not raise, and for an error of more than one line."""
    try:
        parser.read(data, folder)
    except (ResourceManagerError, BadInput) as error:
        message = str(error)
        if len(message.splitlines()) != 1:
            raise AssertionError(f"not one line: {message[:500]!r}") from error
