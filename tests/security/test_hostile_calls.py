"""No route answers a hostile value with a crash, whatever the role; the long run is in tests/e2e."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import pytest
from flask.testing import FlaskClient

from resource_manager.rest.tokens import Role
from tests.security.hostile_calls import all_routes, calls

AsRole = Callable[..., FlaskClient]
ROUNDS = 4


@pytest.mark.parametrize("role", [None, Role.READER, Role.AGENT, Role.USER, Role.OPERATOR], ids=str)
def test_no_hostile_value_crashes_a_route(role: Role | None, as_role: AsRole) -> None:
    client = as_role(role)
    for call in islice(calls(random.Random(str(role))), ROUNDS * len(all_routes())):
        answer = client.open(call.path, method=call.method, headers=call.headers, data=call.body)
        assert answer.status_code != 500, (call, answer.text[:500])
        assert "Traceback" not in answer.text
        answer.close()
    assert as_role(None).get("/healthz").status_code == 200
