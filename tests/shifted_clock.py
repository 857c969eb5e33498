"""A wall clock that a test moves, for servers that are started under it."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_suffix(".c")


def time_shifted_by(file: Path) -> SimpleNamespace:
    """Return the module `time` with a wall clock that is as far ahead as the file of a clock says."""

    def now() -> float:
        return time.time() + struct.unpack("q", file.read_bytes())[0]

    return SimpleNamespace(time=now, monotonic=time.monotonic, sleep=time.sleep)


class ShiftedClock:
    """The wall clock of the processes that are started within `applied`: `shift_s` ahead of ours."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="clock-"))
        self.folder.chmod(0o755)  # servers run as users of their own
        self._library = self.folder / "shifted_clock.so"
        self.file = self.folder / "shift"
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
        with self.file.open("r+b" if self.file.exists() else "wb") as file:
            file.write(struct.pack("q", self.shift_s))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Start processes under this clock meanwhile."""
        given = {"LD_PRELOAD": str(self._library), "SHIFTED_CLOCK": str(self.file)}
        os.environ.update(given)
        try:
            yield
        finally:
            for name in given:
                del os.environ[name]

    def close(self) -> None:
        shutil.rmtree(self.folder)
