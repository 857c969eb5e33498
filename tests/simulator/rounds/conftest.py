"""Data of the studies, where it is there."""

from __future__ import annotations

from pathlib import Path

import pytest


def folder_of(shared_data: Path, study: str) -> Path:
    folder = shared_data / study
    if not folder.is_dir():
        pytest.skip(f"the data of the study is not at {folder}: see docs/simulators/published.md")
    return folder


@pytest.fixture(scope="session")
def pollux_data(shared_data: Path) -> Path:
    return folder_of(shared_data, "pollux")


@pytest.fixture(scope="session")
def shockwave_data(shared_data: Path) -> Path:
    return folder_of(shared_data, "shockwave")
