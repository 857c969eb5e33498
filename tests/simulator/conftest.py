"""Data of the studies, where it is there."""

from __future__ import annotations

from pathlib import Path

import pytest


def folder_of(shared_data: Path, study: str, page: str = "published") -> Path:
    folder = shared_data / study
    if not folder.is_dir():
        pytest.skip(f"the data of the study is not at {folder}: see docs/simulators/{page}.md")
    return folder


@pytest.fixture(scope="session")
def pollux_data(shared_data: Path) -> Path:
    return folder_of(shared_data, "pollux")


@pytest.fixture(scope="session")
def shockwave_data(shared_data: Path) -> Path:
    return folder_of(shared_data, "shockwave")


@pytest.fixture(scope="session")
def gavel_data(shared_data: Path) -> Path:
    return folder_of(shared_data, "gavel", "shares")
