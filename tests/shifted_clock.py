"""A wall clock that a test moves, for servers that are started under it."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class ShiftedClock:
    """The wall clock of the processes that are started within `applied`: `shift_s` ahead of ours."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="clock-"))
        self.folder.chmod(0o755)  # servers run as users of their own
        self._library = self.folder / "shifted_clock.so"
        self._file = self.folder / "shift"
        self.shift_s = 0
        self.jump(0)
        compiler = shutil.which("cc") or shutil.which("gcc") or ""
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self._library, SOURCE], check=True)

    @classmethod
    def missing(cls) -> str:
        """Return what this machine lacks for it; empty if nothing."""
        return "" if shutil.which("cc") or shutil.which("gcc") else "needs a C compiler (Debian: gcc)"

    def jump(self, seconds: int) -> None:
        """Move the clock forward, or back where that is negative."""
        self.shift_s += seconds
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", self.shift_s))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Start processes under this clock meanwhile."""
        given = {"LD_PRELOAD": str(self._library), "SHIFTED_CLOCK": str(self._file)}
        os.environ.update(given)
        try:
            yield
        finally:
            for name in given:
                del os.environ[name]

    def close(self) -> None:
        shutil.rmtree(self.folder)
