"""The audit trail: every change as a line of JSON in a file or in syslog, at least once and in order."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Any, NamedTuple

from resource_manager.errors import SettingsError
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.backup import NUMBERS_LEFT_FREE
from resource_manager.storage.draft_file import replacing
from resource_manager.storage.incarnation import began_at

logger = logging.getLogger(__name__)

SYSLOG = "syslog"
DEVICE = "/dev/log"
PAGE = 500
PRIORITY = SysLogHandler.LOG_AUTHPRIV << 3 | SysLogHandler.LOG_INFO

Line = dict[str, Any]
Write = Callable[[Sequence[Line]], None]


class _Cursor(NamedTuple):
    """Position of a trail: place, state and the version written last; without an incarnation nothing is."""

    incarnation: str = ""
    version: int = 0
    place: str = ""


class AuditTrail:
    """Follower of the history that writes each change out and keeps a cursor outside of the store.

    The cursor moves after the lines are on disk: a crash between repeats lines, which have the same `version`
    and `at`, and loses none. Changes that the store dropped unread, and a state that took another's place,
    are lines of their own. `place` is where the lines go. The newest cursor in the folder for this place, of
    this state or of one before it, counts, so that a store whose address or password changed is not written
    again. Raises `SettingsError` for a cursor that cannot be read.
    """

    def __init__(self, manager: GPUResourceManager, write: Write, cursor: Path, place: str = "") -> None:
        self._manager = manager
        self._write = write
        self._cursor, self._place = cursor, place
        stored, state = _read_cursor(cursor), manager.store.incarnation
        if place and state and stored.incarnation in ("", state):
            newest = _newest_in(cursor.parent, place, state)
            if newest.incarnation == state or _is_restored(manager):
                stored = max(stored, newest)
        self._incarnation, self._version = stored.incarnation, stored.version
        self._is_stored = True

    def follow(self) -> int:
        """Write what changed since the last call and return the number of changes."""
        now_at = self._manager.read(lambda cluster, now: cluster.version)
        incarnation = self._manager.store.incarnation
        written, last, before, began = 0, self._version, 0, began_at(incarnation)
        if self._incarnation and incarnation != self._incarnation:
            self._write([_gap("state_replaced", now_at, self._version)])
            last, before = 0, self._version
        is_known = incarnation == self._incarnation
        while page := self._manager.history(last, PAGE):
            lines: list[Line] = []
            for entry in page:
                # A reset keeps the history of the state before it, most of which is written already.
                is_earlier, is_written = entry["at"] < began, entry["version"] <= before
                if is_known and entry["version"] != last + 1:
                    lines.append(_gap("dropped_unread", entry["version"], last))
                if not (is_earlier and is_written):
                    lines.append(dict(entry))
                    written += 1
                last, is_known = entry["version"], not is_earlier
            if lines:
                self._write(lines)
                self._move_to(incarnation, last)
        if incarnation != self._incarnation:  # a state without a history begins where it is
            self._move_to(incarnation, now_at)
        if not self._is_stored:
            self._store_cursor()
        return written

    def _move_to(self, incarnation: str, version: int) -> None:
        """Go on from there, also with a cursor that cannot be written: else each look repeats its lines."""
        self._incarnation, self._version, self._is_stored = incarnation, version, False
        with suppress(OSError):  # the end of `follow` tries again, and tells
            self._store_cursor()

    def _store_cursor(self) -> None:
        with replacing(self._cursor, 0o600) as stream:
            stream.write(json.dumps(_Cursor(self._incarnation, self._version, self._place)._asdict()))
            stream.flush()
            os.fsync(stream.fileno())
        self._is_stored = True


def audit_trail(manager: GPUResourceManager, target: str, folder: Path) -> AuditTrail:
    """Return the trail to `syslog` or to the file of that name, with its cursor in `folder`.

    Raises `SettingsError` if nothing can be written there.
    """
    place = target if target == SYSLOG else str(Path(target).absolute())
    name = sha256(f"{manager.settings.store} {place}".encode()).hexdigest()[:16]
    write: Write = to_syslog if target == SYSLOG else partial(to_file, Path(place))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write([])
    except OSError as error:
        raise SettingsError(f"--audit {target}: {error.strerror or error}") from error
    return AuditTrail(manager, write, folder / f"{name}.audit", place)


def to_file(path: Path, lines: Sequence[Line]) -> None:
    """Append each line to the file, which is opened for each call, so that a rotated one begins again."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o640), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = _cut_half_line(file)
        try:
            file.write("".join(f"{_text(line)}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:  # such as a full disk: no half line stays
            os.ftruncate(file.fileno(), end)
            raise


def to_syslog(lines: Sequence[Line]) -> None:
    """Send each line to this machine's log, as `gpu-manager-audit` of the facility authpriv."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.connect(DEVICE)
        for line in lines:
            try:
                log.send(_message(line))
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                shortened = {name: line.get(name, "") for name in ("version", "change", "at", "by")}
                log.send(_message({**shortened, "truncated": True}))


def _message(line: Line) -> bytes:
    return f"<{PRIORITY}>gpu-manager-audit: {_text(line)}".encode()


def _text(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False)


def _gap(change: str, version: int, before: int) -> Line:
    """Log that the trail has a gap, and return the line for it."""
    logger.warning("audit: %s: the store is at version %d, the trail at %d", change, version, before)
    return {"change": change, "version": version, "before": before}


def _cut_half_line(file: Any) -> int:
    """Cut off a last line that a crash left without its end; return the size, and seek to it."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(end - 65536, 0)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        end = begin if newline < 0 else begin + newline + 1
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
    return int(file.seek(0, os.SEEK_END))


def _newest_in(folder: Path, place: str, incarnation: str) -> _Cursor:
    newest = _Cursor()
    for path in folder.glob("*.audit"):
        with suppress(SettingsError):  # it may be that of another trail
            each = _read_cursor(path)
            if each.place == place and each.incarnation <= incarnation:
                newest = max(newest, each)
    return newest


def _is_restored(manager: GPUResourceManager) -> bool:
    """Return whether the state came from a backup into a store without a history of its own.

    Another store may write to the same place: its cursor is no end of this one's trail.
    """
    began = began_at(manager.store.incarnation)
    return manager.read(lambda cluster, now: cluster.version) >= NUMBERS_LEFT_FREE and not any(
        entry["at"] < began for entry in manager.history(0, 1)
    )


def _read_cursor(path: Path) -> _Cursor:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _Cursor(str(found["incarnation"]), int(found["version"]), str(found.get("place", "")))
    except FileNotFoundError:
        return _Cursor()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(
            f"{path}: not the cursor of an audit trail ({error}): remove it, and what the store still has is "
            "written again"
        ) from error
