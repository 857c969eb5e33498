"""Rows of CSV and JSON files; every error names file, line and reason."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simulator.errors import InputError

MAX_VALUE = 10**15
"""Largest number a table may hold: sums and squares stay finite, and seconds exact."""

MAX_SHOWN = 100

PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip"}


class Row(NamedTuple):
    """One row of a table: its values by column, and its position: the line, or the place in a JSON list."""

    values: Mapping[str, Any]
    path: Path
    line: int | None
    place: int | None = None

    def fail(self, reason: str) -> InputError:
        """Return the error to raise about this row."""
        item = "" if self.place is None else f"item {self.place}: "
        return InputError(f"{item}{reason}", path=self.path, line=self.line)

    def text(self, column: str) -> str:
        """Return the value as text; empty if the column is absent."""
        value = self.values.get(column)
        if isinstance(value, list | dict):
            raise self.fail(f"{column} is {json.dumps(value)[:MAX_SHOWN]}, not one text or number")
        return "" if value is None else str(value).strip()

    def whole(
        self, column: str, default: int | None = None, *, least: int = 0, most: float = MAX_VALUE
    ) -> int:
        """Return a whole number of `least` to `most`; an empty value gives the default, if there is one."""
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            value = int(_plain(text))
        except ValueError:
            raise self.fail(f"{column} is {text!r}, not a whole number") from None
        if value < least:
            raise self.fail(f"{column} is {value}, below {least:,}")
        if value > most:
            raise self.fail(f"{column} is {value}, above {most:,}")
        return value

    def wholes(self, columns: Iterable[str], most: int) -> list[int]:
        """Return whole numbers of 0 to `most`: quicker than one call of `whole` for each column."""
        try:
            texts = [self.values[column] for column in columns]
            _plain("".join(map(str, texts)))
            numbers = list(map(int, texts))
        except (TypeError, ValueError):
            numbers = [-1]
        if min(numbers) < 0 or max(numbers) > most:
            return [self.whole(column, most=most) for column in columns]
        return numbers

    def number(self, column: str, default: float | None = None, *, most: float = MAX_VALUE) -> float:
        """Return a number of 0 to `most`; an empty value gives the default, if there is one."""
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            value = float(_plain(text))
        except ValueError:
            raise self.fail(f"{column} is {text!r}, not a number") from None
        if not 0 <= value < math.inf:
            raise self.fail(f"{column} is {text}, not a finite number of 0 or more")
        if value > most:
            raise self.fail(f"{column} is {text}, above {most:,}")
        return value


def _plain(text: str) -> str:
    """Return the text of a number; raise `ValueError` for 1_000, which Python alone reads as a thousand."""
    if "_" in text:
        raise ValueError(text)
    return text


def _no_text(path: Path, error: Exception) -> str:
    return "compressed: unpack it first" if path.suffix in PACKED else f"not a table of text: {error}"


def read_csv(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header; raise `InputError` for a missing file, column or value."""
    try:
        file = path.open(newline="", encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    with file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            for name in columns:
                if name not in header:
                    if not header:
                        reason = f"it is empty: its first line must name the columns {','.join(columns)}"
                        raise InputError(reason, path=path, line=1)
                    there = ",".join(header)[:MAX_SHOWN]
                    raise InputError(f"the column {name} is missing: there is {there!r}", path=path, line=1)
            for name in header:
                if name and header.count(name) > 1:
                    raise InputError(f"the column {name} appears twice", path=path, line=1)
            for texts in reader:
                if not texts:
                    continue
                if len(texts) != len(header):
                    reason = f"{len(texts)} values for {len(header)} columns"
                    raise InputError(reason, path=path, line=reader.line_num)
                yield Row(dict(zip(header, texts, strict=True)), path, reader.line_num)
        except (UnicodeDecodeError, csv.Error) as error:
            line = reader.line_num or None  # not known of a byte that is no text
            raise InputError(_no_text(path, error), path=path, line=line) from error
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", path=path) from error


def _parsed(text: str) -> Any:
    """Return the value in a JSON text; raise `ValueError`, also for a string that could not be written."""
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json_lines(path: Path) -> Iterator[Row]:
    """Yield the objects of a file with one JSON object a line; raise `InputError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise InputError(_no_text(path, error), path=path) from error
    for line, part in enumerate(text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            value = _parsed(part)
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON: {_mistake(error)}", path=path, line=line) from None
        if not isinstance(value, dict):
            raise InputError("not a JSON object", path=path, line=line)
        yield Row(value, path, line)


def _mistake(error: Exception) -> str:
    """Return what is wrong and where in its line, whose number the error has in front of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, at column {error.colno}"
    return str(error)


MAX_UNPACKED_BYTES = 64 * 2**20
"""Limit of unpacked data: a gzip file can unpack to a thousand times its size."""

MAX_UNPACKED_VALUES = 2_000_000
"""Limit of the values in it, each of which takes up to a hundred bytes of memory for two of the text."""


def _unpacked(path: Path) -> bytes:
    with gzip.open(path) as file:
        data = file.read(MAX_UNPACKED_BYTES + 1)
    if len(data) > MAX_UNPACKED_BYTES:
        raise InputError(f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes", path=path)
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_UNPACKED_VALUES:
        raise InputError(f"unpacks to more than {MAX_UNPACKED_VALUES:,} values", path=path)
    return data


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, gzipped if its name ends in .gz; raise `InputError`."""
    try:
        data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
        if not data.strip():
            raise InputError("it is empty: it must be JSON", path=path)
        return _parsed(data.decode(json.detect_encoding(data)))
    except RecursionError:
        raise InputError("not JSON: nested too deeply", path=path) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"not a whole gzip file: {error}", path=path) from error
    except InputError:
        raise
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise InputError(f"not JSON: {_mistake(error)}", path=path, line=line) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error


def read_json_items(path: Path) -> list[Row]:
    """Return the objects of a JSON list, each with its place from 1 on; raise `InputError`."""
    items = read_json(path)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError("not a list of objects", path=path)
    return [Row(item, path, None, place) for place, item in enumerate(items, start=1)]
