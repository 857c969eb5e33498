"""Admission by price over HTTP: a request states its utility, the answer its utility and price."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from tests.builders import json_of

WORTH = {"utility": 16.0, "target": 7200.0, "expected_runtime": 3600.0}


@pytest.fixture
def priced_client(kept: Persistence) -> Iterator[FlaskClient]:
    with GPUResourceManager.from_url(
        "memory://", admission="price", price_low=1.0, price_high=100.0
    ) as manager:
        service = standalone(manager, kept, open_to="loopback")
        yield create_app(service).test_client()
        service.watch.close()


def test_a_request_below_its_price_is_pending_and_explain_shows_the_price(priced_client: FlaskClient) -> None:
    for server in range(4):
        body = {"task_id": f"half-{server}", "required_gpus": 4, "required_cpus": 32}
        assert (
            priced_client.post("/api/allocate", json={**body, "prefer_server_id": server}).status_code == 200
        )
    task = {"task_id": "cheap", "required_gpus": 4, "required_cpus": 32, **WORTH}
    answer = json_of(priced_client.post("/api/submit", json=task))
    assert answer["state"] == "WAITING"
    query = {key: value for key, value in task.items() if key != "task_id"}
    explained = json_of(priced_client.get("/api/explain", query_string=query))
    assert explained["fits"]
    assert not explained["would_be_granted"]
    assert explained["admission"]["price"] == pytest.approx(10.0)
    assert explained["admission"]["utility"] == pytest.approx(8.0)
    assert explained["admission"]["covered"] is False
    page = priced_client.get("/what-if", query_string=query)
    assert "utility 8 does not exceed the price 10 on gpu-server-0" in page.text


def test_a_utility_without_a_target_is_refused(priced_client: FlaskClient) -> None:
    task = {"task_id": "wrong", "required_gpus": 4, "required_cpus": 32, "utility": 5.0}
    answer = priced_client.post("/api/submit", json=task)
    assert answer.status_code == 400
    assert "target" in json_of(answer)["detail"]
