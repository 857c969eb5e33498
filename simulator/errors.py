"""Errors of the simulators; their root is the project's own."""

from __future__ import annotations

from pathlib import Path

from resource_manager.errors import ResourceManagerError

LONGEST_REASON = 1000


class SimulationError(ResourceManagerError):
    """A simulation that cannot run as asked."""


class InputError(SimulationError, ValueError):
    """Bad input; where it came from a file, the message names file and line."""

    def __init__(self, reason: str, *, path: str | Path | None = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        # The reason may quote the file; what cannot be printed there must not steer a terminal, nor fill it.
        reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
        super().__init__(where + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason))
        self.path = path
        self.line = line
        self.reason = reason
