"""The published instances, where they are there."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gavel_data(shared_data: Path) -> Path:
    folder = shared_data / "gavel"
    if not folder.is_dir():
        pytest.skip(f"the data of the study is not at {folder}: see docs/simulators/shares.md")
    return folder
