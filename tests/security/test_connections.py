"""Connections that are held, not used: half-open requests, many of one address, streams of events."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from flask.testing import FlaskClient

from resource_manager.rest import events
from resource_manager.rest.app import create_app
from resource_manager.rest.http_server import bounded_server, drain, stop_listening
from resource_manager.rest.limits import network_of
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.eventually import wait_for
from tests.listening import listening

AsRole = Callable[..., FlaskClient]
HALF = b"POST /api/allocate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"


@pytest.fixture
def serve(service: Service) -> Iterator[Callable[..., tuple[str, int]]]:
    """Return serve(**bounds): start a server in a thread and return its address."""
    stack = ExitStack()

    def start(**bounds: Any) -> tuple[str, int]:
        server = bounded_server(create_app(service), "127.0.0.1", 0, threads=4, **bounds)
        stack.enter_context(listening(server))
        return "127.0.0.1", int(server.effective_port)

    with stack:
        yield start


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent", [b"", HALF, HALF + b"\r\n{"], ids=["nothing", "half a header", "half a body"]
)
def test_a_half_open_request_is_ended_though_it_goes_on_slowly(sent: bytes, serve: Any) -> None:
    address = serve(header_s=0.5, request_s=1.0)
    with socket.create_connection(address) as slow:
        slow.sendall(sent)

        def dripping() -> bool:
            if sent:
                try:
                    slow.send(b"x")
                except ConnectionError:
                    return True
            return is_closed(slow)

        wait_for(dripping, timeout_s=30)


def test_a_request_in_time_and_the_pause_after_it_are_left_alone(serve: Any) -> None:
    address = serve(header_s=2.0)
    with socket.create_connection(address) as client:
        for _ in range(2):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.settimeout(30)
            assert client.recv(10_000).startswith(b"HTTP/1.1 200")
            pause = time.monotonic() + 2.5
            while time.monotonic() < pause:
                assert not is_closed(client)


def test_one_address_cannot_hold_all_connections(serve: Any) -> None:
    """More than it may have are turned away, and the others go on as soon as one ends."""
    address = serve(max_per_address=5)
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        for connection in held:
            connection.sendall(HALF)
        with socket.create_connection(address) as more:
            more.settimeout(30)
            assert more.recv(1000).startswith(b"HTTP/1.1 429")
            wait_for(lambda: is_closed(more))
        # Another address: only loopback has several on every machine.
        with socket.create_connection(address, source_address=("127.0.0.2", 0)) as other:
            other.sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
            other.settimeout(30)
            assert other.recv(1000).startswith(b"HTTP/1.0 200")
        held[0].close()
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{address[1]}/healthz").status_code == 200)


def test_the_connections_of_the_trusted_proxy_are_not_counted(serve: Any) -> None:
    address = serve(max_per_address=2, trusted_proxy="127.0.0.1")
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(address)).sendall(HALF)
        assert httpx.get(f"http://127.0.0.1:{address[1]}/healthz").status_code == 200


def answered(connection: socket.socket) -> bool:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    connection.settimeout(30)
    return connection.recv(10_000).startswith(b"HTTP/1.1 200")


def test_a_new_connection_of_an_address_ends_the_one_that_is_idle_for_longest(service: Service) -> None:
    """Clients keep connections between calls: those that wait for an answer or begin a request stay."""
    server = bounded_server(create_app(service), "127.0.0.1", 0, threads=4, max_per_address=4)
    address = "127.0.0.1", int(server.effective_port)
    with listening(server), ExitStack() as stack:
        begins, *idle = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        begins.sendall(HALF)
        for each in (idle[1], idle[0], idle[2]):
            assert answered(each)
            # A client has its answer shortly before the server knows that it has.
            [channel] = [
                known for known in list(server.active_channels.values()) if known.addr == each.getsockname()
            ]
            wait_for(channel.is_idle)
        assert answered(stack.enter_context(socket.create_connection(address)))
        wait_for(lambda: is_closed(idle[1]))
        assert not any(is_closed(each) for each in (begins, idle[0], idle[2]))


def test_idle_connections_of_many_addresses_leave_room_for_new_ones(serve: Any) -> None:
    address = serve(max_connections=16)  # and one for each of 4 threads
    with ExitStack() as stack:
        for number in range(2, 42):
            source = (f"127.0.0.{number}", 0)
            connection = socket.create_connection(address, timeout=30, source_address=source)
            assert answered(stack.enter_context(connection))


def blocked(ended: threading.Event) -> Callable[..., list[bytes]]:
    """Return an application that answers nothing before `ended` is set."""

    def answer(environ: Any, start_response: Any) -> list[bytes]:
        ended.wait(60)
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    return answer


GET = b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_requests_that_wait_for_a_thread_are_left_out_of_the_loop_and_answered_in_their_turn() -> None:
    """The loop asks each connection at every event: behind a backlog that cost more than the work."""
    ended = threading.Event()
    server = bounded_server(blocked(ended), "127.0.0.1", 0, threads=1, max_per_address=9)
    idle = len(server._map)
    with listening(server), ExitStack() as stack:
        address = "127.0.0.1", int(server.effective_port)
        waiting = [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
        for connection in waiting:
            connection.sendall(GET)
        wait_for(lambda: len(server.task_dispatcher.queue) == 8)
        wait_for(lambda: len(server._map) == idle + 1)
        with socket.create_connection(address) as more:  # they count for their address nevertheless
            more.settimeout(30)
            assert more.recv(1000).startswith(b"HTTP/1.1 429")
        for _ in range(4):
            waiting.pop().close()
        ended.set()
        for connection in waiting:
            connection.settimeout(30)
            for then in (GET, b""):
                answer = b""
                while not answer.endswith(b"ok"):
                    answer += connection.recv(1000)
                connection.sendall(then)
        wait_for(lambda: len(server._map) == idle + 5)


PART = b"x" * 2**24


def in_parts(environ: Any, start_response: Any) -> list[bytes]:
    """Answer a GET with more than any client's window takes, another method with nothing."""
    parts = [PART] * 3 if environ["REQUEST_METHOD"] == "GET" else []
    start_response("200 OK", [("Content-Length", str(len(PART) * len(parts)))])
    return parts


@pytest.mark.parametrize("sent", [GET, GET * 8], ids=["one", "several at once"])
def test_who_reads_no_answer_keeps_no_thread_from_others(sent: bytes) -> None:
    server = bounded_server(in_parts, "127.0.0.1", 0, threads=1)
    address = "127.0.0.1", int(server.effective_port)
    with listening(server), socket.create_connection(address) as mute:
        mute.sendall(sent)
        wait_for(lambda: any(channel.total_outbufs_len for channel in server.active_channels.values()))
        for _ in range(4):
            assert httpx.options(f"http://127.0.0.1:{address[1]}/", timeout=30).status_code == 200


def test_the_answers_to_requests_that_come_at_once_do_not_add_up() -> None:
    """A client that waits for no answer gets one, two if the second was late, and is told that it is last."""
    server = bounded_server(in_parts, "127.0.0.1", 0, threads=1)
    with listening(server), socket.create_connection(("127.0.0.1", int(server.effective_port))) as hasty:
        hasty.sendall(GET.replace(b"GET", b"OPTIONS") * 60)
        hasty.settimeout(30)
        answers = hasty.makefile("rb").read()
    assert 1 <= answers.count(b" 200 OK") <= 2
    assert answers.count(b"Connection: close") == 1


def test_a_connection_on_which_nothing_is_read_is_ended() -> None:
    server = bounded_server(in_parts, "127.0.0.1", 0, threads=1, unread_s=0.5)
    address = "127.0.0.1", int(server.effective_port)
    with listening(server), socket.create_connection(address) as mute, httpx.Client() as other:
        assert other.options(f"http://127.0.0.1:{address[1]}/").status_code == 200
        mute.sendall(GET)
        wait_for(lambda: len(server.active_channels) == 2)
        wait_for(lambda: len(server.active_channels) == 1)
        assert other.options(f"http://127.0.0.1:{address[1]}/").status_code == 200


@pytest.mark.parametrize("path", [b"/api/status", b"/livez"])
def test_a_backlog_beyond_its_bound_keeps_new_connections_out(path: bytes) -> None:
    """Requests of any kind: checks of health wait for threads of their own."""
    ended = threading.Event()
    server = bounded_server(blocked(ended), "127.0.0.1", 0, threads=2, max_connections=3)
    with listening(server), ExitStack() as stack:
        address = "127.0.0.1", int(server.effective_port)
        waiting = [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
        for connection in waiting:
            connection.sendall(GET.replace(b"/api/status", path))
        wait_for(server.task_dispatcher.is_full)
        assert not server.readable()
        assert len(server.active_channels) < len(waiting)
        ended.set()
        for connection in waiting:
            connection.settimeout(30)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.close()


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("?", "?"),
    ],
)
def test_a_host_with_a_whole_network_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network


def test_the_streams_of_one_reader_leave_places_to_others(as_role: AsRole, service: Service) -> None:
    mallory, ada = as_role(Role.READER, "mallory"), as_role(Role.READER, "ada")
    with ExitStack() as stack:
        for _ in range(events.MAX_STREAMS_PER_CALLER):
            stream = mallory.get("/events")
            stack.callback(stream.close)
            assert stream.status_code == 200
        again = as_role(Role.READER, "mallory")  # another token of the same name
        for client in (mallory, again):
            refused = client.get("/events")
            assert refused.status_code == 429
            assert refused.headers["Retry-After"]
        stream = ada.get("/events")
        stack.callback(stream.close)
        assert stream.status_code == 200
    assert service.metrics.open_streams == {}
    stream = mallory.get("/events")
    assert stream.status_code == 200
    stream.close()


def test_a_reader_who_clicks_from_page_to_page_is_no_attacker(
    serve: Any, service: Service, as_role: AsRole
) -> None:
    """A page that is gone gives its stream back at once, not with the next heartbeat."""
    address = serve()
    token = as_role(Role.READER, "ada").environ_base["HTTP_AUTHORIZATION"]
    request = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n".encode()
    for _ in range(events.MAX_STREAMS_PER_CALLER):
        with socket.create_connection(address) as page:
            page.sendall(request)
            page.settimeout(30)
            assert page.recv(1000).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    wait_for(lambda: service.metrics.open_streams == {})
    assert time.monotonic() - began < events.HEARTBEAT_S - 2


@pytest.mark.parametrize(("path", "status"), [("/login", 413), ("/api/allocate", 401)])
def test_ten_megabytes_are_refused_with_an_answer(serve: Any, path: str, status: int) -> None:
    """A server that only closes the connection leaves its caller with a broken pipe."""
    host, port = serve()
    answer = httpx.post(f"http://{host}:{port}{path}", content=b"x" * 10_000_000, timeout=30.0)
    assert answer.status_code == status


def test_an_answer_for_which_there_is_no_space_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk; else the loop would wait at full speed for more of it to be sent."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Length", str(2**21))])
        return [b"x" * 2**21]

    server = bounded_server(app, "127.0.0.1", 0, threads=1)
    address = "127.0.0.1", int(server.effective_port)
    with listening(server), socket.create_connection(address) as client, suppress(ConnectionError):
        client.sendall(GET)
        client.settimeout(10)
        while client.recv(2**20):
            pass


def test_a_server_that_ends_answers_what_has_come_and_has_others_go_elsewhere() -> None:
    began, ends = threading.Event(), threading.Event()

    def app(environ: Any, start_response: Any) -> list[bytes]:
        began.set()
        ends.wait(60)
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    server = bounded_server(app, "127.0.0.1", 0, threads=1)
    address = "127.0.0.1", int(server.effective_port)
    with listening(server), ExitStack() as stack:
        working, queued, silent = (stack.enter_context(socket.create_connection(address)) for _ in range(3))
        for connection in (working, queued):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            connection.settimeout(60)
        assert began.wait(60)
        listeners = stop_listening(server)
        wait_for(lambda: not server.accepting)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        drain(listeners, 0.05)
        ends.set()
        silent.close()
        drain(listeners, 60)
        for connection in (working, queued):
            answer = connection.makefile("rb").read()
            assert b" 200 OK\r\n" in answer
            assert b"\r\nConnection: close\r\n" in answer
