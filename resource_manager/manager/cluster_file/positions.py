"""Positions in a TOML text: line and column of every key, table and element; `tomllib` does not tell."""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence

Path = tuple[str | int, ...]
"""Path to a value: keys of tables, and numbers of the elements of arrays from 0."""

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""{1,3}|\'\'\'.*?\'\'\'{1,3}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL
)
_BARE = re.compile(r"[^\s=,\[\]{}#]+(?:[ \t]+[\d:.+Zz-]+)?")
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")
_KEY = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|[A-Za-z0-9_-]+')


class _Scanner:
    """One pass over a text that `tomllib` has accepted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        """Number of tables so far in each array of tables."""

    def scan(self) -> dict[Path, int]:
        """Return the offset of every value's key, or of the value itself in an array."""
        table: Path = ()
        while self._skip():
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.found

    def _skip(self) -> bool:
        """Skip space and comments; return False at the end."""
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.at < len(self.text)

    def _header(self) -> Path:
        begin, is_array = self.at, self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        *parents, last = self._keys()
        self.at += 2 if is_array else 1
        path: Path = ()
        for key in parents:
            self.found.setdefault((*path, key), begin)
            path = self._element((*path, key))
        path = (*path, last)
        self.found.setdefault(path, begin)
        if not is_array:
            return path
        self._sizes[path] = self._sizes.get(path, 0) + 1
        path = self._element(path)
        self.found[path] = begin
        return path

    def _element(self, path: Path) -> Path:
        """Return the path of the last table of an array of tables; the path itself of another table."""
        return (*path, self._sizes[path] - 1) if path in self._sizes else path

    def _keys(self) -> list[str]:
        found = []
        while True:
            self._skip()
            match = _KEY.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            found.append(_plain(match[0]))
            self._skip()
            if self.text[self.at] != ".":
                return found
            self.at += 1

    def _pair(self, table: Path) -> None:
        begin = self.at
        path = table
        for key in self._keys():
            path = (*path, key)
            self.found.setdefault(path, begin)
        self.at += 1  # the equals sign
        self._value(path)

    def _value(self, path: Path) -> None:
        self._skip()
        opening = self.text[self.at]
        if opening in "[{":
            self._several(path, "]" if opening == "[" else "}")
            return
        match = _STRING.match(self.text, self.at) or _BARE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _several(self, path: Path, closing: str) -> None:
        """Pass over an array or an inline table."""
        self.at += 1
        number = 0
        while self._skip() and self.text[self.at] != closing:
            if self.text[self.at] == ",":
                self.at += 1
            elif closing == "}":
                self._pair(path)
            else:
                self.found[(*path, number)] = self.at
                self._value((*path, number))
                number += 1
        self.at += 1


def _plain(key: str) -> str:
    return str(next(iter(tomllib.loads(f"{key} = 0")))) if key[0] in "\"'" else key


def dotted(location: Sequence[str | int]) -> str:
    """Return a location as a dotted key: `servers.2.cpus`, `teams."a.b".limit`."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else quoted(part) for part in map(str, location))


def quoted(text: str) -> str:
    """Return a basic string of TOML: that of JSON, but for the one character that TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def location_of(field: str) -> Path:
    """Return the location that `dotted` wrote."""
    parts = (_plain(match[0]) for match in _KEY.finditer(field))
    return tuple(int(part) if part.isdecimal() else part for part in parts)


class Positions:
    """Line and column of every value in a text, which must be valid TOML."""

    def __init__(self, text: str) -> None:
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._offsets: Mapping[Path, int] = _Scanner(text).scan()

    def of(self, location: Sequence[str | int]) -> tuple[int, int]:
        """Return line and column, from 1, of the value there, else of the innermost table that has it.

        Parts that name nothing in the text, such as the branches of a union, are passed over.
        """
        path: Path = ()
        for part in location:
            path = next((way for way in ((*path, part), (*path, str(part))) if way in self._offsets), path)
        offset = self._offsets.get(path, 0)
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1
