"""Structured logs, and spans if the SDK is installed."""

from __future__ import annotations

import json
import logging

import pytest
from flask.testing import FlaskClient

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
