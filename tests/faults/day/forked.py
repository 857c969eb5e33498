"""Processes of `gpu-manager` forked from one that has loaded it.

Each that loads it by itself takes half a second of processor time to begin: with two thousand of them on two
cores a day would be about that.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from resource_manager.cli import main

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [__name__, *(f"resource_manager.{name}" for name in ("rest.client", "cli.attended", "cli.by_agent"))]
)
_lock = threading.Lock()
"""Held where a process is started or its end is read: each start reads the ends of all others, too."""


class ForkedProgram:
    """A process of `gpu-manager` with these words, whose output goes to a file."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], said: Path) -> None:
        self._process = _context.Process(target=_be, args=(tuple(words), dict(environment), said))
        with _lock:
            self._process.start()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        wait([self._process.sentinel])
        with _lock:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it if it still runs."""
        with _lock:
            self._process.kill()


def _be(words: Sequence[str], environment: Mapping[str, str], said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with said.open("wb") as file, open(os.devnull, "rb") as nothing:
        for descriptor, of in ((0, nothing), (1, file), (2, file)):
            os.dup2(of.fileno(), descriptor)
    sys.argv = ["gpu-manager", *words]
    main(words, prog_name="gpu-manager")
