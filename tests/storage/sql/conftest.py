"""A database of its own of each kind."""

from __future__ import annotations

import pytest

from tests.sql_servers import DATABASES


@pytest.fixture(params=["sqlite", *DATABASES])
def url(request: pytest.FixtureRequest) -> str:
    fresh_url: str = request.getfixturevalue(request.param).fresh_url()
    return fresh_url
