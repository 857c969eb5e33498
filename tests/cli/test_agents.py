"""Installation of agents: what a server gets is all that its agent needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import resource_manager
from resource_manager.cli.agents import PROGRAM


def test_the_files_that_a_server_gets_run_without_the_package(tmp_path: Path) -> None:
    package = Path(resource_manager.__file__).parent
    for name in PROGRAM:
        (tmp_path / "resource_manager" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / name, tmp_path / "resource_manager" / name)
    modules = [f"resource_manager/{name}".removesuffix(".py").replace("/", ".") for name in PROGRAM]
    alone = [sys.executable, "-S", "-c", "\n".join(f"import {module}" for module in modules)]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
