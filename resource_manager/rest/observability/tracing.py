"""OpenTelemetry spans of requests, if its API is installed; the SDK decides on their export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    HAS_API = False
else:
    HAS_API = True


def request_span(name: str, headers: Iterable[tuple[str, str]]) -> AbstractContextManager[Any]:
    """Return a server span for one request, a child of the caller's span if they sent `traceparent`.

    It is None without an SDK, since nobody would get the span.
    """
    if not HAS_API or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return contextlib.nullcontext()
    carrier = {key.lower(): value for key, value in headers}
    return trace.get_tracer("gpu-resource-manager").start_as_current_span(
        name, context=propagate.extract(carrier), kind=trace.SpanKind.SERVER
    )
