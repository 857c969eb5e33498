"""Structured logs, and spans if the SDK is installed."""

from __future__ import annotations

import json
import logging

import pytest
from flask.testing import FlaskClient

from resource_manager.core.names import short_id
from resource_manager.rest.app import MAX_LOGGED
from resource_manager.rest.observability.logs import JsonFormatter


def test_a_log_line_is_one_json_object(caplog: pytest.LogCaptureFixture, open_client: FlaskClient) -> None:
    with caplog.at_level(logging.INFO, "resource_manager.rest.access"):
        open_client.get("/api/status?limit=1")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    line = next(line for line in lines if line["logger"] == "resource_manager.rest.access")
    assert line["path"] == "/api/status"
    assert line["status"] == 200
    assert line["caller"] == "anonymous"
    assert line["duration_ms"] > 0


def test_an_exception_is_logged_in_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "no %s", ("luck",), (ValueError, error, None))
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "no luck"


def test_a_request_is_a_span_of_its_callers_trace(open_client: FlaskClient) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    open_client.get("/api/status", headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET /api/status"
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.attributes["http.response.status_code"] == 200


def test_the_access_log_says_what_a_request_changed_and_who_asked(
    caplog: pytest.LogCaptureFixture, open_client: FlaskClient
) -> None:
    for name in ("first", "waits"):
        open_client.post("/api/submit", json={"task_id": name, "gpus": 8, "cpus": 64, "server": 0})
    caplog.clear()  # where a test before left the log at INFO, it holds the two submits
    with caplog.at_level(logging.INFO, "resource_manager.rest.access"):
        open_client.post("/api/servers/1/drain", json={"reason": "fans"})
        open_client.post("/api/release", json={"task_id": "first", "outcome": "SUCCESS"})
        open_client.post("/api/release", json={"task_id": "first"})
        open_client.get("/api/status")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    made = [(line["message"], line.get("changes")) for line in lines if line["logger"].endswith(".access")]
    drained = "drained gpu-server-1 fans, by anonymous"
    released = f"released first {short_id(1)} SUCCESS, by anonymous"
    assert made == [
        (f"POST /api/servers/1/drain 200; {drained}", [drained]),
        (f"POST /api/release 200; {released}", [released]),
        ("POST /api/release 404", None),
        ("GET /api/status 200", None),
    ]


def test_many_changes_of_one_request_are_counted_in_its_line(
    caplog: pytest.LogCaptureFixture, open_client: FlaskClient
) -> None:
    requests = [{"task_id": f"t{number}", "gpu_milli": 100, "cpus": 1} for number in range(MAX_LOGGED + 3)]
    with caplog.at_level(logging.INFO, "resource_manager.rest.access"):
        open_client.post("/api/allocate/batch", json={"requests": requests})
    [record] = [record for record in caplog.records if record.name.endswith(".access")]
    changes = json.loads(JsonFormatter().format(record))["changes"]
    assert changes[1] == f"granted t1 {short_id(2)} on gpu-server-0, GPU 0, by anonymous"
    assert changes[MAX_LOGGED:] == ["and 3 more"]
