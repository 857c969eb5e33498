"""The archive: a history file that receives every change before the store drops it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from itertools import count
from pathlib import Path
from typing import IO, Any

from resource_manager.errors import SettingsError
from resource_manager.storage.history_file import PAGE, HistorySource, collect, write_file

logger = logging.getLogger(__name__)


def extend(path: Path, source: HistorySource) -> int:
    """Append the changes that the file does not have yet and return their number; create a missing file.

    A file is one unbroken history, as `collect` returns it. If the store's history does not continue it (the
    store was reset or emptied, Redis was restarted, or changes were dropped before they were read), the file
    is renamed after its last version and a new one started. Several processes may extend one file. Raises
    `SettingsError` for a file that is not an archive, and `OSError`.
    """
    if not path.is_file():  # a missing one, or one that cannot be replaced
        return _begin(path, source)
    try:
        return _append(path, source)
    except OSError as error:
        error.filename = error.filename or str(path)  # the disk is full, or away
        raise


def _append(path: Path, source: HistorySource) -> int:
    written = 0
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return extend(path, source)  # another process has just renamed it
        last, line = _last_line(file, path)
        if not _continues(source, last, line):
            _rename(path, last)
            return _begin(path, source)
        while page := source.history(last, PAGE):
            lines = []
            for entry in page:
                if entry["version"] != last + 1:
                    break
                last += 1
                lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            written += len(lines)
            if len(lines) < len(page):
                _rename(path, last)
                return written + _begin(path, source)
    return written


def _begin(path: Path, source: HistorySource) -> int:
    history = collect(source)
    write_file(history, path)
    return len(history.changes)


def _continues(source: HistorySource, last: int, line: dict[str, Any]) -> bool:
    """Return whether the file's last line is of this store's history, not of one from before a reset."""
    entries: list[dict[str, Any]] = []
    if "snapshot" not in line:
        for back in (1, PAGE):  # `collect` omits changes of unknown leases: the line is an earlier one
            page = source.history(max(last - back, 0), back)
            entries = [{**entry, "version": last} for entry in page if entry["version"] <= last]
            if any(json.loads(json.dumps(entry)) == line for entry in reversed(entries)):
                return True
    return not entries and bool(source.snapshot()["version"] >= last)


def _rename(path: Path, last: int) -> None:
    aside = path.with_name(f"{path.name}.{last}")
    for number in count(2):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.name}.{last}-{number}")
    logger.warning(
        "the history does not continue from version %d: it was reset or emptied, Redis was restarted, or "
        "changes were dropped before they were archived; %s was renamed to %s",
        last,
        path,
        aside.name,
    )
    path.replace(aside)


def _last_line(file: IO[bytes], path: Path) -> tuple[int, dict[str, Any]]:
    """Return the last whole line and its version; cut off a partial line that a crash left."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    begin = end
    while begin and tail.count(b"\n") < 2:
        begin = max(begin - 65536, 0)
        file.seek(begin)
        tail = file.read(end - begin)
    whole, newline, torn = tail.rpartition(b"\n")
    try:
        if not newline:
            raise ValueError("no whole line")
        line = json.loads(whole.rpartition(b"\n")[2])
        version = int(line["snapshot"]["version"] if "snapshot" in line else line["version"])
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError(f"{path} is not an archive of a history; choose another file") from error
    if torn:
        file.truncate(end - len(torn))
    file.seek(0, os.SEEK_END)
    return version, line
