"""Marks of the state outside of its store, by which a service knows a store that was set back to a dump."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from resource_manager.errors import StateLostError
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage import MemoryStore
from resource_manager.storage.clock import JUMP_S
from resource_manager.storage.draft_file import replacing
from resource_manager.storage.incarnation import began_at
from resource_manager.storage.mark import Mark, is_behind, mark_of

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
"""Time between two marks: what a crash of the store may lose, a second or two, is in none of them."""


class StateMarks:
    """The newest mark that this process knows, from files and from agents; thread-safe.

    While the state of the manager's store lacks it, nothing is granted.
    """

    def __init__(self, manager: GPUResourceManager, *, check_every_s: float = CHECK_EVERY_S) -> None:
        self._manager = manager
        self._check_every_s = check_every_s
        self._lock = threading.Lock()
        self._files: Sequence[Path] = ()
        self._known: Mark | None = None
        self._seen_by = ""
        self._unwritten: set[Path] = set()
        self._next: Mark | None = None
        self._next_at = 0.0
        self.is_behind = False
        """Whether the state lacks the newest mark, so that nothing is granted."""

    @property
    def mark(self) -> str:
        """The mark for others to remember; empty if there is none, or the state lacks it."""
        return "" if self._known is None or self.is_behind else str(self._known)

    def keep_in(self, files: Sequence[Path]) -> None:
        """Read the marks in these files, which need not exist, and keep them up to date; check the state.

        Of the other marks beside them those of this incarnation are read, as of a store whose address or
        password was another one.
        """
        self._files = files
        self._manager.read(lambda cluster, now: None)  # which state it is
        beside = {other for file in files for other in file.parent.glob("*.mark")}
        for file in {*files, *beside}:
            mark = Mark.parse(_read(file))
            if file in files or (mark and mark.incarnation == self._manager.store.incarnation):
                self._learn(mark)
        self.check()

    def hear(self, text: str | None, by: str = "") -> None:
        """Take a mark that somebody else remembers, as `by` says; check the state if it is a newer one.

        One of a state that is to begin yet was made up: neither a restore nor a reset would end it.
        """
        mark, store = Mark.parse(text), self._manager.store
        if mark is None:
            return
        latest = max(store.now() + JUMP_S, began_at(store.incarnation))
        if began_at(mark.incarnation) <= latest and self._learn(mark, by):
            self.check()

    def check(self) -> None:
        """Compare the state with the newest mark, and take the mark of a while ago; call it regularly."""
        if isinstance(self._manager.store, MemoryStore):  # each is a new one, and no older dump of another
            return
        with self._lock:
            store, known = self._manager.store, self._known
            try:
                version = self._manager.read(lambda cluster, now: cluster.version)
            except StateLostError:
                self._close_instead()
                raise
            if known is not None and is_behind(store, version, known):
                if not self.is_behind:
                    logger.error("%s", self._manager.distrust(known, self._seen_by))
                self.is_behind = True
                return
            if self.is_behind:
                self._manager.trust()
                self.is_behind = False
            if not store.incarnation or time.monotonic() - self._next_at < self._check_every_s:
                return
            taken, self._next = self._next, mark_of(store, version) or self._next
            self._next_at = time.monotonic()
            if taken is None or taken == known or (known is not None and taken < known):
                return
            if is_behind(store, version, taken):  # a crash of the store lost that change
                return
            self._known, self._seen_by = taken, ""
            for file in self._files:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with replacing(file, 0o600) as stream:
                        stream.write(str(taken))
                except OSError as error:
                    if file not in self._unwritten:
                        self._unwritten.add(file)
                        logger.warning("no mark of the state is kept in %s: %s", file, error)
                else:
                    self._unwritten.discard(file)

    def _close_instead(self) -> None:
        """Close the servers of the state in the place of this process's own, if it lacks the mark."""
        with GPUResourceManager(self._manager.settings) as begun:
            version = begun.read(lambda cluster, now: cluster.version)
            if self._known is not None and is_behind(begun.store, version, self._known):
                begun.distrust(self._known, self._seen_by)

    def _learn(self, mark: Mark | None, by: str = "") -> bool:
        with self._lock:
            if mark is None or (self._known is not None and mark <= self._known):
                return False
            self._known, self._seen_by = mark, by
            return True


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
