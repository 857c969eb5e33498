"""Files of a run, each written as a whole or not at all, so that an interruption leaves no partial report."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from resource_manager.cli.base import inert
from resource_manager.storage.draft_file import draft_of


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path beside `path`, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path) as (handle, draft):
        os.close(handle)
        write(draft)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, as a whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """Write indented JSON, as a whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header, as a whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([inert(value) if isinstance(value, str) else value for value in row] for row in rows)
    write_text(path, text.getvalue())
