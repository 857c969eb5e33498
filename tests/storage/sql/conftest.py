"""A database of its own of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sql_servers import DATABASES


@pytest.fixture(params=["sqlite", *DATABASES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    fresh_url: str = request.getfixturevalue(request.param).fresh_url()
    return fresh_url
