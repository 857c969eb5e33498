"""Service against its own OpenAPI document and against malformed requests."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from resource_manager import GPUResourceManager
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.tokens import Role, create
from tests.builders import Clock

# Before any test: pytest rewrites it on import, which Python 3.11 cannot do while another thread compiles.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance

CHANGES = (
    "/api/allocate",
    "/api/allocate/batch",
    "/api/submit",
    "/api/release",
    "/api/renew",
    "/api/preempt",
    "/api/cancel",
    "/api/servers/0/drain",
    "/api/servers/0/adopt",
    "/api/servers/0/resume",
    "/api/servers/0/searched",
    "/api/reset",
    "/api/maintenance",
    "/api/maintenance/remove",
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
keys = st.sampled_from(
    [
        "task_id",
        "gpus",
        "cpus",
        "server",
        "required_gpus",
        "required_cpus",
        "gpu_milli",
        "ttl",
        "requests",
        "confirm",
        "gpus",
    ]
)


def state(manager: GPUResourceManager) -> dict[str, Any]:
    return {**manager.get_resource_summary(), "all": manager.leases()}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(CHANGES), body=st.dictionaries(keys | st.text(max_size=5), values, max_size=5))
def test_invalid_bodies_change_nothing(
    open_client: FlaskClient, manager: GPUResourceManager, path: str, body: dict[str, Any]
) -> None:
    before = state(manager)
    response = open_client.post(path, json=body)
    if response.status_code == 200:  # a valid body by chance: undo it
        manager.reset_resources()
        manager.resume(0)
        return
    assert 400 <= response.status_code < 500 or response.status_code == 503
    assert response.content_type == "application/problem+json"
    assert state(manager) == before


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(CHANGES), raw=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_not_json_are_400(
    open_client: FlaskClient, manager: GPUResourceManager, path: str, raw: bytes
) -> None:
    before = state(manager)
    response = open_client.post(path, data=raw, content_type="application/json")
    if response.status_code != 200:
        assert response.status_code == 400
        assert state(manager) == before


@pytest.mark.parametrize(
    ("content_type", "raw", "status"),
    [
        ("text/plain", b'{"task_id": "t", "required_gpus": 2, "required_cpus": 1}', 415),
        ("application/x-www-form-urlencoded", b"task_id=t&required_gpus=2&required_cpus=1", 415),
        ("multipart/form-data; boundary=x", b"--x--", 415),
        ("application/json", b'{"task_id": "t", "required_gpus": 2, "required_cpus": 1}' + b" " * 2**20, 413),
        ("application/json", b"[" * 100_000, 400),
        ("application/json", b'{"task_id": "\xff\xfe", "required_gpus": 2, "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "\\ud800", "required_gpus": 2, "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "t", "required_gpus": 1e400, "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "t", "required_gpus": 2.0, "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "t", "required_gpus": true, "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "t", "required_gpus": "2", "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "a\\nb", "required_gpus": 2, "required_cpus": 1}', 400),
        ("application/json", b'{"task_id": "t", "required_gpus": 2, "required_cpus": 1, "ttl": NaN}', 400),
        ("application/json", b'{"task_id": "t", "required_gpus": 2, "required_cpus": 1, "gpus": 8}', 400),
        (
            "application/json",
            b'{"task_id": "t", "required_gpus": 2, "required_cpus": 64, "resources": {"cpus": 0}}',
            400,
        ),
    ],
)
def test_malformed_requests_are_refused_and_change_nothing(
    open_client: FlaskClient, manager: GPUResourceManager, content_type: str, raw: bytes, status: int
) -> None:
    before = state(manager)
    assert open_client.post("/api/allocate", data=raw, content_type=content_type).status_code == status
    assert state(manager) == before


def test_an_invalid_text_is_reported_in_plain_words(open_client: FlaskClient) -> None:
    payload = {"task_id": "a\nb", "required_gpus": 2, "required_cpus": 1}
    problem = open_client.post("/api/allocate", json=payload).get_json()
    assert problem["detail"] == "task_id has a control or an invisible character"
    query = {"required_gpus": 2, "required_cpus": 1, "resources": "memory_mib=-1"}
    problem = open_client.get("/api/explain", query_string=query).get_json()
    assert problem["detail"] == "resources: memory_mib must be greater than or equal to 0, got -1"


def test_random_headers_and_methods_cause_no_server_error(
    open_client: FlaskClient, manager: GPUResourceManager
) -> None:
    before = state(manager)
    draw = random.Random(7)
    for _ in range(100):
        name = draw.choice(["Authorization", "Cookie", "Origin", "Accept", "X-CSRF-Token", "Last-Event-ID"])
        value = "".join(chr(draw.randrange(33, 255)) for _ in range(draw.randrange(1, 60)))
        method = draw.choice(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
        path = draw.choice(["/api/allocate", "/api/status", "/metrics", "/"])
        response = open_client.open(path, method=method, headers={name: value})
        assert response.status_code < 500, (method, path, name, value)
    assert state(manager) == before


@pytest.mark.parametrize(
    ("paths", "rounds"),
    [
        ("^/api/(queue|history|leases)$", 10),
        pytest.param(".", 30, marks=[pytest.mark.e2e, pytest.mark.timeout(1800)]),
    ],
    ids=["a few paths", "all paths"],
)
def test_schemathesis_finds_no_server_error(
    manager: GPUResourceManager, kept: Persistence, paths: str, rounds: int
) -> None:
    """Inputs are drawn by the shape of each operation; a name, as changes have it, takes seconds to make."""
    # It also tries wrong tokens, of which an address may send so many in a minute.
    service = standalone(manager, kept, rate="100000/second", clock=Clock(step_s=60.0))
    app = create_app(service)
    headers = {"Authorization": f"Bearer {create(kept.tokens, 'tester', Role.OPERATOR)}"}
    schema = schemathesis.openapi.from_wsgi("/openapi.json", app, headers=headers).include(path_regex=paths)
    seen: set[str] = set()

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def explore(data: st.DataObject) -> None:
        for result in schema.get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()
            case = data.draw(operation.as_strategy())
            seen.add(operation.label)
            response = case.call(headers=headers)
            # The inventory and the settings, which a schema does not contain, decide on what fits.
            excluded: list[Any] = [positive_data_acceptance]
            if response.status_code == 503 and "kind" in response.json():
                excluded.append(
                    not_a_server_error
                )  # the original design's answer to a request that does not fit
            case.validate_response(response, headers=headers, excluded_checks=excluded)

    explore()
    service.watch.close()
    assert len(seen) == len(list(schema.get_all_operations())) >= 3
