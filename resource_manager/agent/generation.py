"""Generation of the state that an agent was told of last, which outlives the agent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from zlib import crc32

MAX_TEXT = 200


def state_folder() -> Path:
    """Return the folder for what a program of this user remembers: systemd's for its unit, else XDG's."""
    if folder := os.environ.get("STATE_DIRECTORY"):
        return Path(folder.partition(":")[0])
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "gpu-manager"


def mark_file(server: str, urls: str) -> Path:
    """Return where the agent of a server remembers the state of the service at these addresses."""
    service = crc32(" ".join(sorted(urls.split())).encode(errors="replace"))
    return state_folder() / f"agent-{server}-{service:08x}.mark"


class KnownGeneration:
    """Mark of the newest state that a service told: its incarnation, its version and a time, with `/`.

    Later incarnations sort after earlier ones. Where its file cannot be written, it is remembered as long as
    this process lives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = ""
        with suppress(OSError, UnicodeDecodeError):
            self._told = path.read_text(encoding="utf-8").strip()

    @property
    def mark(self) -> str | None:
        """The mark as a service told it; None if there is none."""
        return self._told or None

    @property
    def newest(self) -> tuple[str, int]:
        """Incarnation and version of that state; an empty one and 0 if there is none."""
        return _key(self._told)

    def take(self, mark: object) -> bool:
        """Remember what a service told if it is newer; return False if it is of an earlier incarnation."""
        if not isinstance(mark, str) or not 0 < len(mark) <= MAX_TEXT:
            return True
        if _key(mark)[0] < _key(self._told)[0]:
            return False
        if _key(mark) > _key(self._told):
            self._told = mark
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                draft = self._path.with_suffix(".new")
                draft.write_text(mark, encoding="utf-8")
                draft.replace(self._path)
        return True


def _key(mark: str) -> tuple[str, int]:
    incarnation, _, rest = mark.partition("/")
    version = rest.partition("/")[0]
    return incarnation, int(version) if version.isdecimal() else 0
