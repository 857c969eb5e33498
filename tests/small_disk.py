"""Small file systems that a test may fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(folder: Path, options: str) -> Iterator[Path]:
    """Yield a new tmpfs with these mount options; skip the test without the right to mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def take_all_files(disk: Path) -> None:
    """Make files until there can be no more, on a disk with `nr_inodes=64`; raises `OSError`."""
    for number in range(64):
        (disk / f"filler-{number}").touch()
