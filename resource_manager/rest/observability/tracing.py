"""OpenTelemetry spans of requests, if its API is installed; the SDK decides on their export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Span(Protocol):
    def set_attribute(self, key: str, value: Any) -> Any: ...


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        """Do nothing."""


try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:

    def request_span(name: str, headers: Iterable[tuple[str, str]]) -> AbstractContextManager[Span]:
        """Return a span that is not recorded."""
        return contextlib.nullcontext(_NoSpan())

else:

    def request_span(name: str, headers: Iterable[tuple[str, str]]) -> AbstractContextManager[Span]:
        """Return a server span for one request, a child of the caller's span if they sent `traceparent`."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return contextlib.nullcontext(_NoSpan())  # there is no SDK: nobody would get the span
        carrier = {key.lower(): value for key, value in headers}
        return trace.get_tracer("gpu-resource-manager").start_as_current_span(
            name, context=propagate.extract(carrier), kind=trace.SpanKind.SERVER
        )
