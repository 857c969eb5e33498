"""Server-sent events that report changes to every open page."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

from resource_manager.rest.problems import ProblemError
from resource_manager.rest.service import Service

CLIENT_GONE = "gpu_manager.client_disconnected"
"""Key in an ASGI scope of a function that returns True once the client has disconnected."""

HEARTBEAT_S = 10.0
CHECK_S = 0.5
"""Interval of looking if the page is still there: who clicks from page to page has one stream, not many."""

STREAM_LIFE_S = 300.0
"""Longest life of a stream. The browser then opens a new one, which is refused if the token was revoked."""

MAX_STREAMS_PER_CALLER = 8
"""Streams of one caller; each takes a thread for as long as its page is open."""

_places = threading.Lock()


class EventStream:
    """Stream of events for one page; it counts against both limits on streams until it is closed.

    `gone` returns True once the client has disconnected. It ends if the store falls silent, since the page
    would say that it is live. Raises `ProblemError` if the caller, or all together, have too many streams
    open, and `StoreError`.
    """

    def __init__(self, service: Service, caller: str, after: int, gone: Callable[[], bool]) -> None:
        service.watch.check()
        streams = service.metrics.open_streams
        with _places:
            if streams.get(caller, 0) >= MAX_STREAMS_PER_CALLER:
                detail = f"{MAX_STREAMS_PER_CALLER} of your pages follow events already: close one"
                raise ProblemError(429, detail, retry_after_s=30)
            if sum(streams.values()) >= service.max_streams:
                detail = "too many pages follow events: close one, or try again later"
                raise ProblemError(503, detail, retry_after_s=30)
            streams[caller] = streams.get(caller, 0) + 1
        self._service = service
        self._caller = caller
        self._lines = self._follow(after, gone)
        self._closed = False

    def __iter__(self) -> Iterator[str]:
        return self._lines

    def close(self) -> None:
        """Stop counting the stream as open; the WSGI server calls this at the end of the answer."""
        if not self._closed:
            self._closed = True
            streams = self._service.metrics.open_streams
            with _places:
                streams[self._caller] -= 1
                if not streams[self._caller]:
                    del streams[self._caller]

    def _follow(self, after: int, gone: Callable[[], bool]) -> Iterator[str]:
        watch = self._service.watch
        ends = time.monotonic() + STREAM_LIFE_S
        beats_at = time.monotonic() + HEARTBEAT_S
        yield "retry: 2000\n\n"
        while not (watch.stopped or watch.is_silent or gone()) and time.monotonic() < ends:
            notice = watch.wait(after, CHECK_S)
            if notice is None:
                if time.monotonic() >= beats_at:
                    beats_at = time.monotonic() + HEARTBEAT_S
                    yield ": quiet\n\n"
                continue
            after = notice.version
            ids = None if notice.server_ids is None else sorted(notice.server_ids)
            yield f"id: {after}\nevent: change\ndata: {json.dumps({'version': after, 'servers': ids})}\n\n"
