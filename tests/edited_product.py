"""A copy of the product with a few lines more, as a newcomer would add them, run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree, ignore_patterns

from tests.test_architecture import ROOT


def run_with(lines: Mapping[str, Mapping[str, str]], program: str, folder: Path, *arguments: str) -> None:
    """Run a program on a copy of the product, in which each of these lines stands before the one named.

    `lines` gives by file of `resource_manager` the lines by those that they stand before, which the file has
    once.
    """
    copy = copytree(
        ROOT / "resource_manager", folder / "resource_manager", ignore=ignore_patterns("__pycache__")
    )
    for name, added in lines.items():
        text = (copy / name).read_text()
        for beside, new in added.items():
            assert text.count(beside) == 1, beside
            text = text.replace(beside, new + beside)
        (copy / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
