"""Errors of the simulators; all derive from the project's `ResourceManagerError`."""

from __future__ import annotations

from pathlib import Path

from resource_manager.errors import ResourceManagerError

MAX_REASON_LENGTH = 1000


class SimulationError(ResourceManagerError):
    """A simulation that cannot run as asked."""


class InputError(SimulationError, ValueError):
    """Bad input; the message names the file and line where the input came from one."""

    def __init__(self, reason: str, *, path: str | Path | None = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        # The reason may quote the file: unprintable text must not steer a terminal, nor long text fill it.
        reason = reason if len(reason) <= MAX_REASON_LENGTH else f"{reason[:MAX_REASON_LENGTH]}…"
        super().__init__(where + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason))
        self.path = path
        self.line = line
        self.reason = reason
