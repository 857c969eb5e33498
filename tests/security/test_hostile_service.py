"""A hostile or broken service at the other end of the command line: nothing steers the terminal, one line."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.cli.program import main
from resource_manager.errors import PriorityError
from resource_manager.rest.answers import MAX_DEPTH, harmless
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.client_errors import ServiceUnavailableError

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\n"
COMMANDS = (
    ("status",),
    ("leases",),
    ("queue",),
    ("history",),
    ("server", "0"),
    ("teams",),
    ("cluster",),
    ("explain", "--gpus", "2"),
    ("maintenance", "list"),
    ("report",),
    ("top", "--once"),
    ("allocate", "new", "--gpus", "2"),
    ("release", "holds"),
)


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://") as manager:
        manager.allocate("holds", 8, server=0, owner="anonymous")
        manager.submit("waits", 8, server=0)
        yield manager


class Relay:
    """A service in front of an honest one, which spoils its answers of success."""

    def __init__(self, manager: GPUResourceManager, kept: Persistence) -> None:
        self.service = standalone(manager, kept, open_to="loopback")
        self.spoil: Any = lambda value: value
        self.status = 0
        self.raw: bytes | None = None
        honest = create_app(self.service).test_client()
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {"Content-Type": self.headers.get("Content-Type", "")}
                found = honest.open(self.path, method=self.command, data=body, headers=headers)
                value = relay.spoil(found.json) if found.status_code == 200 else found.json
                text = json.dumps(value).encode() if relay.raw is None else relay.raw
                self.send_response(relay.status or found.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.service.watch.close()


@pytest.fixture
def relay(manager: GPUResourceManager, kept: Persistence) -> Iterator[Relay]:
    made = Relay(manager, kept)
    yield made
    made.close()


def run(relay: Relay, *command: str) -> Any:
    return CliRunner().invoke(main, ["--url", relay.url, *command], color=False)


def with_escapes(value: Any) -> Any:
    """Return the value with escapes in every text that is not of a fixed set."""
    if isinstance(value, str):
        return value if value.isupper() else f"{value}{ESCAPES}"
    if isinstance(value, list):
        return [with_escapes(item) for item in value]
    if isinstance(value, dict):
        return {key: with_escapes(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_answer_steers_the_terminal(relay: Relay, command: tuple[str, ...], as_json: bool) -> None:
    relay.spoil = with_escapes
    ran = run(relay, *command, *(["--json"] if as_json and command[0] not in ("cluster", "top") else []))
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"}.intersection(ran.output)
    assert "owned" in ran.output or ran.exit_code or command[0] in ("release", "maintenance", "teams")


def odd(value: Any, rng: random.Random) -> Any:
    """Return the value with one of its parts replaced by something of another shape."""
    value = copy.deepcopy(value)
    parts: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            parts.append((part, key))
            if isinstance(item, dict | list):
                collect(item)

    collect(value)
    part, key = rng.choice(parts)
    if isinstance(part, dict) and rng.random() < 0.3:
        del part[key]
    else:
        part[key] = rng.choice((None, [], {}, "x", -1, 1e300, 10**30, [[]], {"a": None}, True))
    return value


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_odd_shape_is_one_line(relay: Relay, command: tuple[str, ...]) -> None:
    rng = random.Random(" ".join(command))
    relay.spoil = lambda value: odd(value, rng)
    for _ in range(12):
        ran = run(relay, *command)
        assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
        if ran.exit_code:
            assert len(ran.output.strip().splitlines()) == 1, ran.output


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"3", b"null", b"\xff", b'{"items": [{}]}', b""])
def test_what_is_no_answer_is_one_line(relay: Relay, raw: bytes) -> None:
    relay.raw = raw
    for command in (("status",), ("queue",), ("release", "holds")):
        ran = run(relay, *command)
        assert ran.exit_code == 3
        assert len(ran.output.strip().splitlines()) == 1


def test_a_deep_answer_is_refused() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    with pytest.raises(ValueError, match="nested deeper"):
        harmless(deep)


def test_names_of_every_script_come_through(relay: Relay, manager: GPUResourceManager) -> None:
    name = "نام\u200cها [b] 👩 ü"
    manager.cancel("waits")
    manager.allocate(name, 2, server=1)
    client = ServiceClient(relay.url)
    assert name in [lease["task_id"] for lease in client.leases()]
    relay.spoil = lambda value: {**value, "leases": "many"}
    with pytest.raises(
        ServiceUnavailableError,
        match=r"answer to GET /api/status .*: leases: Input should be a valid integer",
    ):
        client.get_resource_summary()
    client.close()


def test_a_client_raises_what_the_service_refuses(relay: Relay) -> None:
    client = ServiceClient(relay.url)
    relay.status, relay.raw = 400, json.dumps({"detail": "priority …", "max_priority": 7}).encode()
    with pytest.raises(PriorityError) as caught:
        client.submit("t", 2, priority=8)
    assert caught.value.most == 7
    client.close()
