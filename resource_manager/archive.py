"""The archive: a history file that grows by every change before the store forgets it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from itertools import count
from pathlib import Path
from typing import IO, Any

from resource_manager.errors import SettingsError
from resource_manager.history import PAGE, Recorded, collect, write_file

logger = logging.getLogger(__name__)


def extend(path: Path, source: Recorded) -> int:
    """Appends the changes that the file does not have yet, and says how many; makes it if there is none.

    A file is one unbroken history, as `collect` makes it. Where the store's does not go on from there (it
    was reset or emptied, Redis was restarted, or forgot changes before they were read), the file is set
    aside under the number of its last version and a new one begun. Several processes may extend one file.
    Raises `SettingsError` for a file that is no archive, and `OSError`.
    """
    if not path.exists():
        return _begin(path, source)
    written = 0
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return extend(path, source)  # another process has just set it aside
        last, line = _last_line(file, path)
        if not _goes_on(source, last, line):
            _set_aside(path, last)
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
                _set_aside(path, last)
                return written + _begin(path, source)
    return written


def _begin(path: Path, source: Recorded) -> int:
    history = collect(source)
    write_file(history, path)
    return len(history.changes)


def _goes_on(source: Recorded, last: int, line: dict[str, Any]) -> bool:
    """Whether the file's last line is of this store's history, and not of one that began anew since."""
    entries: list[dict[str, Any]] = []
    if "snapshot" not in line:
        for back in (1, PAGE):  # `collect` leaves out changes of unknown leases: then the line is one before
            page = source.history(max(last - back, 0), back)
            entries = [{**entry, "version": last} for entry in page if entry["version"] <= last]
            if any(json.loads(json.dumps(entry)) == line for entry in reversed(entries)):
                return True
    return not entries and bool(source.snapshot()["version"] >= last)


def _set_aside(path: Path, last: int) -> None:
    aside = path.with_name(f"{path.name}.{last}")
    for number in count(2):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.name}.{last}-{number}")
    logger.warning(
        "the history does not go on from version %d: it was reset or emptied, Redis was restarted, or the "
        "changes between were forgotten before they were archived; %s is now %s",
        last,
        path,
        aside.name,
    )
    path.replace(aside)


def _last_line(file: IO[bytes], path: Path) -> tuple[int, dict[str, Any]]:
    """The last whole line and its version; what a crash left behind it is cut off."""
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
        raise SettingsError(f"{path} is no archive of a history; choose another file") from error
    if torn:
        file.truncate(end - len(torn))
    file.seek(0, os.SEEK_END)
    return version, line


__all__ = ["extend"]
