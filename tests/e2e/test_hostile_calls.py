"""A minute of hostile values against the real service: no crash, no call that hangs, and it goes on."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from benchmarks.floods import Service
from resource_manager.rest.tokens import Role
from tests.security.hostile_calls import calls

SECONDS = 60.0
LONGEST_S = 10.0


@pytest.mark.e2e
def test_a_minute_of_hostile_calls() -> None:
    rng = random.Random(43)
    with ExitStack() as stack:
        service = Service(stack)
        callers = [
            stack.enter_context(service.client(str(role), role, timeout_s=LONGEST_S))
            for role in (Role.READER, Role.USER, Role.OPERATOR)
        ]
        callers.append(stack.enter_context(httpx.Client(base_url=service.url, timeout=LONGEST_S)))
        ends_at = time.monotonic() + SECONDS
        for call in calls(rng):
            if time.monotonic() > ends_at:
                break
            request: dict[str, Any] = {
                "headers": {k: v.encode("latin-1", "replace") for k, v in call.headers.items()}
            }
            answer = rng.choice(callers).request(call.method, call.path, content=call.body, **request)
            assert answer.status_code != 500, (call, answer.text[:500])
            assert "Traceback" not in answer.text
        assert httpx.get(f"{service.url}/healthz").status_code == 200
