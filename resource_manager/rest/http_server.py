"""HTTP server of the standalone service: waitress, with bounds on what one address can hold."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer, create_server
from waitress.task import ThreadedTaskDispatcher, WSGITask

from resource_manager.rest.held_requests import PARK, UNCHANGED, Parked
from resource_manager.rest.limits import APART, MAX_BODY_BYTES, THREADS_APART, network_of

HEADER_S = 10.0
"""Longest time until the header of a request is there, from its first byte or from the connection."""

REQUEST_S = 60.0
"""Longest time until the body of a request is there too."""

UNREAD_S = 120.0
"""Longest time in which a client takes nothing of an answer."""

MAX_CONNECTIONS = 512
"""Connections without a whole request; as many again may wait for a thread, and any number is held."""

MAX_OPEN_FILES = 2**20
"""Limits above this are those of a system that has none."""

MAX_PER_ADDRESS = 128

SPARE = 8
"""Connections below the limit from which on each new one ends an idle one: those that come get in at once."""

DRAIN_LOOK_S = 0.01

REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class _Parking(BaseException):
    """End of a task whose request is held; no `Exception`, for which waitress would answer the request."""


class HoldingTask(WSGITask):  # type: ignore[misc]
    """Task that can leave its request with its channel, without an answer, until it is resumed."""

    is_parked = False

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        if self.channel.held_request is not self.request:
            environ[PARK] = self._park
        else:
            environ[UNCHANGED] = self.channel.is_unchanged
        return environ

    def _park(self) -> Parked:
        self.is_parked = True
        return self.channel.park(self.request)  # type: ignore[no-any-return]

    def build_response_header(self) -> bytes:
        # The answers to requests that come before the last is answered would wait for who may read none.
        if self.channel.server.task_dispatcher.is_draining or len(self.channel.requests) > 1:
            self.set_close_on_finish()
        header: bytes = super().build_response_header()
        return header

    def write(self, data: bytes) -> None:
        if not self.is_parked:
            super().write(data)

    def execute(self) -> None:
        super().execute()
        if self.is_parked:
            raise _Parking


class Addresses:
    """Connections by network, without those whose request is held; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._connections: Counter[str] = Counter()

    def count(self, network: str, more: int) -> None:
        with self._lock:
            self._connections[network] += more
            if not self._connections[network]:
                del self._connections[network]

    def is_over(self, network: str) -> bool:
        return self._connections[network] > self._most


class BoundedChannel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """Connection that ends if its request takes too long to arrive, or its address has too many of them.

    waitress itself ends only connections that are silent, and counts them all together: a few hundred that
    send a byte now and then would keep everybody out.
    """

    addresses: Addresses
    trusted_proxy: str | None = None
    header_s: float
    request_s: float
    unread_s: float
    task_class = HoldingTask
    held_request: Any = None
    """The request that is or was held: it is carried out once more, and then not held again."""
    is_unchanged = False
    """True once that request was resumed without being due."""

    def __init__(self, server: Any, sock: Any, addr: Any, adj: Any, map: dict[int, Any]) -> None:
        self._begun_at: float | None = time.monotonic()
        self.network = network_of(addr[0])
        self._state_lock = threading.Lock()
        self._is_outside = self._is_counted = False
        super().__init__(server, sock, addr, adj, map=map)
        self._count(True)
        is_bounded = self.trusted_proxy not in ("*", addr[0])
        if is_bounded and self.addresses.is_over(self.network) and not end_idle(server, self.network):
            with suppress(OSError):
                sock.send(REFUSAL)
            self.will_close = True

    def _count(self, is_counted: bool) -> None:
        if is_counted != self._is_counted:
            self._is_counted = is_counted
            self.addresses.count(self.network, 1 if is_counted else -1)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for an answer, or begins a request."""
        return bool(self.requests or self._begun_at is not None or self.total_outbufs_len)

    def del_channel(self, map: dict[int, Any] | None = None) -> None:
        with self._state_lock:
            super().del_channel(map)
            self._count(False)

    def leave_loop(self, *, is_held: bool = False) -> None:
        """Have the loop of all connections not ask about this one, which waits for a thread or is held.

        The loop asks each one by one whenever something happens on any: behind a backlog it would cost more
        than the work itself.
        """
        with self._state_lock:
            self._is_outside = True
            self._map.pop(self._fileno, None)
            if is_held:
                self._count(False)

    def _enter_loop(self) -> None:
        with self._state_lock:
            if self._is_outside and self._fileno is not None:  # the loop may have closed it as it left
                self._map[self._fileno] = self
            self._is_outside = False

    def write_soon(self, data: Any) -> int:
        if not self.total_outbufs_len:
            self.last_activity = time.time()
        try:
            return int(super().write_soon(data))
        except OSError:  # a long answer waits in a file, for which there may be no space
            self.will_close = True  # the count of what is still to be sent is wrong now, and never zero
            raise

    def cancel(self) -> None:
        super().cancel()
        self._enter_loop()  # which closes it

    def service(self) -> None:
        self._enter_loop()  # which sends an answer that is longer than what the client's window takes
        try:
            super().service()
        except _Parking:
            self._go_on()

    def park(self, request: Any) -> Parked:
        """Keep the request without an answer until it is resumed, and the thread that serves it is done."""
        self.held_request, self.is_unchanged, self._awaited = request, False, 2
        self.leave_loop(is_held=True)
        return Parked(self._resume, lambda: self._unread() == b"")

    def _unread(self) -> bytes | None:
        """Return a byte that has come and is not read; none has if None, and none will if it is empty."""
        connection = self.socket  # None once the loop, which may have looked before it was left, closed it
        try:
            return b"" if connection is None else connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def is_idle(self) -> bool:
        """Return whether it has answered all that has come, and the client has not ended it."""
        return not (self.is_awaited or self.will_close) and self._unread() is None

    def _resume(self, is_due: bool) -> None:
        self.is_unchanged = not is_due
        self._go_on()

    def _go_on(self) -> None:
        with self.requests_lock:
            self._awaited -= 1
            is_due = self._awaited == 0
        if is_due:
            with self._state_lock:
                self._count(self._fileno is not None)
            self.server.add_task(self)

    def received(self, data: bytes) -> bool:
        before = self.request
        taken: bool = super().received(data)
        if self.request is not before:
            self._begun_at = None if self.request is None else time.monotonic()
        elif self.request is None:  # a whole request at once
            self._begun_at = None
        return taken

    def readable(self) -> bool:
        # waitress asks for each connection, once a second at least.
        if self._begun_at is not None and time.monotonic() > self._begun_at + self._allowed_s():
            self.will_close = True
        # waitress would close it once its client can be sent something.
        if (self.total_outbufs_len or self.will_close) and time.time() - self.last_activity > self.unread_s:
            self.handle_close()
            return False
        return bool(super().readable())

    def _allowed_s(self) -> float:
        is_header_there = self.request is not None and self.request.headers_finished
        return self.request_s if is_header_there else self.header_s


def end_idle(server: Any, network: str = "") -> bool:
    """End the connection, of that network if one is given, that has been idle for longest; return if any is.

    Clients keep connections for calls that may never come: as many as are allowed would keep all others out.
    """
    channels = [each for each in list(server.active_channels.values()) if network in ("", each.network)]
    for each in sorted(channels, key=lambda channel: float(channel.last_activity)):
        if each.is_idle():
            each.will_close = True
            return True
    return False


class ApartDispatcher(ThreadedTaskDispatcher):  # type: ignore[misc]
    """Dispatcher with threads of their own for what must not wait behind all others."""

    is_draining = False
    """Whether each answer ends its connection, so that the next request goes to another process."""

    def __init__(self, threads: int, max_waiting: int = MAX_CONNECTIONS) -> None:
        super().__init__()
        self._max_waiting = max_waiting
        self._apart = {name: ThreadedTaskDispatcher() for name in THREADS_APART}
        for name, count in THREADS_APART.items():
            self._apart[name].set_thread_count(count)
        self.set_thread_count(threads)

    def add_task(self, task: Any) -> None:
        task.leave_loop()
        path = getattr(task.requests[0], "path", "") if task.requests else ""
        if path in APART:
            self._apart[APART[path]].add_task(task)
        else:
            super().add_task(task)

    def is_full(self) -> bool:
        """Return whether so many requests wait for a thread that no connection should be accepted."""
        return sum(len(each.queue) for each in (self, *self._apart.values())) >= self._max_waiting

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> bool:
        for dispatcher in self._apart.values():
            dispatcher.set_thread_count(0)
        return bool(super().shutdown(cancel_pending, timeout))


def _accepts(listener: Any, dispatcher: ApartDispatcher) -> bool:
    """Return whether the loop should accept connections of this listener."""
    if len(listener._map) > listener.adj.connection_limit - SPARE:
        end_idle(listener)
    return TcpWSGIServer.readable(listener) and not dispatcher.is_full()


def _allow_open_files() -> None:
    """Let this process have as many open files as it may: each held request has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard <= MAX_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bounded_server(
    app: object,
    host: str,
    port: int,
    *,
    threads: int,
    max_per_address: int = MAX_PER_ADDRESS,
    trusted_proxy: str | None = None,
    max_connections: int = MAX_CONNECTIONS,
    header_s: float = HEADER_S,
    request_s: float = REQUEST_S,
    unread_s: float = UNREAD_S,
) -> Any:
    """Return a waitress server that listens; connections of the `trusted_proxy` are not counted."""
    _allow_open_files()
    dispatcher = ApartDispatcher(threads, max_connections)
    server = create_server(
        app,
        _dispatcher=dispatcher,
        host=host,
        port=port,
        threads=threads,
        ident="gpu-manager",
        connection_limit=threads + max_connections,
        asyncore_use_poll=True,  # select() fails from the 1,024th open file on
        channel_request_lookahead=1,
        outbuf_high_watermark=2**40,  # above it a thread waits until the client reads
        # The app itself refuses bodies above its smaller limit; waitress does not read far larger ones.
        max_request_body_size=16 * MAX_BODY_BYTES,
        clear_untrusted_proxy_headers=True,
        trusted_proxy=trusted_proxy,
        trusted_proxy_headers={"x-forwarded-for", "x-forwarded-proto"} if trusted_proxy else set(),
    )
    bounds = {
        "addresses": Addresses(max_per_address),
        "trusted_proxy": trusted_proxy,
        "header_s": header_s,
        "request_s": request_s,
        "unread_s": unread_s,
    }
    channel_class = type("Channel", (BoundedChannel,), bounds)
    for listener in _listeners(server):
        listener.channel_class = channel_class
        listener.readable = partial(_accepts, listener, dispatcher)
    return server


def _listeners(server: Any) -> list[Any]:
    """Return the sockets of a server that accept connections."""
    found = [server] if isinstance(server, TcpWSGIServer) else list(server.map.values())
    return [each for each in found if isinstance(each, TcpWSGIServer)]


def stop_listening(server: Any) -> list[Any]:
    """Have a server take no more connections, so that a proxy goes on to the next; return its listeners."""
    server.task_dispatcher.is_draining = True
    listeners = _listeners(server)
    for listener in listeners:
        listener.trigger.pull_trigger(partial(_close_listener, listener))  # in the loop's thread
    return listeners


def _close_listener(listener: Any) -> None:
    for _ in range(listener.adj.backlog):  # who is not accepted yet would be cut off
        listener.handle_accept()
    wasyncore.dispatcher.close(listener)  # its trigger goes on to wake the loop


def drain(listeners: list[Any], timeout_s: float) -> None:
    """Wait until all requests are answered that came to these listeners, for so long at most."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at and any(
        listener.accepting or any(channel.is_awaited for channel in list(listener.active_channels.values()))
        for listener in listeners
    ):
        time.sleep(DRAIN_LOOK_S)
