"""Streams of events by which open pages know that they are current."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from flask.testing import FlaskClient

from resource_manager.errors import StoreUnavailableError
from resource_manager.rest import events, state_follower
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role


def test_no_page_follows_a_store_that_cannot_be_read(
    service: Service, as_role: Callable[..., FlaskClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "Live" for as long as the outage lasted."""
    now = [1000.0]
    monkeypatch.setattr(state_follower, "time", Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr(service.watch, "follow", lambda: None)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(events, "CHECK_S", 0.0)
    lines = iter(events.EventStream(service, "ada", 0, lambda: False))
    assert [next(lines), next(lines)] == ["retry: 2000\n\n", ": quiet\n\n"]
    with monkeypatch.context() as outage:
        outage.setattr(state_follower, "read_newest", Mock(side_effect=StoreUnavailableError("no answer")))
        now[0] += 6
        assert next(lines) == ": quiet\n\n", "a look that fails may meet a fail-over"
        now[0] += 6
        assert next(lines, "its end") == "its end"
        assert as_role(Role.READER).get("/events").status_code == 503
        page = as_role(Role.READER, "olga").get("/queue")
        assert page.status_code == 503
        assert page.headers["Refresh"] == page.headers["Retry-After"], "it is loaded again by itself"
    answer = as_role(Role.READER, "vera").get("/events", buffered=False)
    assert answer.status_code == 200
    answer.close()
