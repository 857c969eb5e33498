"""Names in logs, on terminals and in pages: none can forge output, and unprintable ones are refused."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient
from rich.console import Console

from resource_manager import GPUResourceManager
from resource_manager.cli import tables
from resource_manager.cli.program import main
from resource_manager.core.identifiers import JOINERS, UNPRINTABLE
from resource_manager.errors import InvalidRequestError, ResourceManagerError
from resource_manager.rest import tokens
from resource_manager.rest.assemble import Persistence
from resource_manager.rest.observability import logs
from resource_manager.rest.tokens import Role
from tests.security import hostile

AsRole = Callable[..., FlaskClient]


@pytest.mark.parametrize("name", hostile.UNPRINTABLE)
def test_an_unprintable_name_is_refused_everywhere(
    name: str, manager: GPUResourceManager, open_client: FlaskClient
) -> None:
    before = manager.get_resource_summary()["version"]
    for payload in (
        {"task_id": name},
        {"task_id": "t", "team": name},
        {"task_id": "t", "owner": name},
        {"task_id": "t", "labels": {"k": name}},
        {"task_id": "t", "labels": {name: "v"}},
        {"task_id": "t", "vendor": name},
        {"task_id": "t", "gpu_types": [name]},
    ):
        body: dict[str, Any] = {"required_gpus": 2, "required_cpus": 1, **payload}
        for path in ("/api/allocate", "/api/submit"):
            assert open_client.post(path, json=body).status_code == 400
        assert open_client.post("/api/allocate/batch", json={"requests": [body]}).status_code == 400
        with pytest.raises(InvalidRequestError, match="control or an invisible character") as caught:
            manager.submit(**body)
        assert str(caught.value).isprintable()
    assert open_client.post("/api/servers/0/drain", json={"reason": name}).status_code == 400
    with pytest.raises(InvalidRequestError):
        manager.drain(0, reason=name)
    with pytest.raises(InvalidRequestError):
        manager.release_resources("t", outcome=name)
    with pytest.raises(InvalidRequestError):
        manager.cancel("t", reason=name)
    assert manager.get_resource_summary()["version"] == before


@pytest.mark.parametrize("name", [" ", "   ", "\u2800", " \u2800 "])
def test_a_blank_name_is_refused(name: str, manager: GPUResourceManager, open_client: FlaskClient) -> None:
    for field in ("task_id", "team", "owner"):
        body: dict[str, Any] = {"task_id": "t", "required_gpus": 2, "required_cpus": 1, field: name}
        assert open_client.post("/api/submit", json=body).status_code == 400
        with pytest.raises(InvalidRequestError, match="nothing but spaces"):
            manager.submit(**body)
    assert manager.get_resource_summary()["version"] == 0


def test_a_token_has_a_name_that_can_be_told(kept: Persistence) -> None:
    for name in (*hostile.UNPRINTABLE, " ", "", "x" * 101):
        with pytest.raises(ResourceManagerError) as caught:
            tokens.create(kept.tokens, name, Role.USER)
        assert str(caught.value).isprintable()
    for server in (*hostile.UNPRINTABLE, " ", "x" * 251):
        with pytest.raises(ResourceManagerError) as caught:
            tokens.create(kept.tokens, "gpu-a", Role.AGENT, server=server)
        assert str(caught.value).isprintable()
    assert kept.tokens.read() == {}


def test_every_invisible_character_that_this_python_knows_is_refused() -> None:
    """The table is of Unicode 16: a character that later versions add is unassigned here."""
    refused = re.compile(f"[{UNPRINTABLE}{JOINERS}]")
    found = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF)
    kinds = {"Cc", "Cf", "Co", "Zl", "Zp", "Zs"}
    missed = [c for c in found if unicodedata.category(c) in kinds and c != " " and not refused.match(c)]
    assert missed == []


def test_names_in_every_script_are_accepted(open_client: FlaskClient) -> None:
    for name in (
        "模型-训练",
        "Ελλάδα",
        "обучение",
        "naïve café",
        "🚀",
        "نموذج",
        "می\u200cخواهم",
        "क्\u200dष",
        "ශ්\u200dරී",
        "한국어",
        "Tiếng",
    ):
        body = {"task_id": name, "required_gpus": 2, "required_cpus": 1}
        assert open_client.post("/api/allocate", json=body).status_code == 200
        assert open_client.post("/api/release", json={"task_id": name}).status_code == 200


def test_names_are_equal_only_if_all_characters_are(as_role: AsRole) -> None:
    """Names are neither case-folded nor normalised: a similar name neither finds nor ends the lease."""
    ada = as_role(Role.USER, "ada")
    payload = {"task_id": "caf\u00e9", "required_gpus": 2, "required_cpus": 1}
    assert ada.post("/api/allocate", json=payload).status_code == 200
    for twin in ("cafe\u0301", "CAF\u00c9", "caf\u00e9 "):
        assert ada.post("/api/release", json={"task_id": twin}).status_code == 404
    cyrillic = as_role(Role.USER, "\u0430da")
    assert cyrillic.post("/api/release", json={"task_id": payload["task_id"]}).status_code == 403


def formatted(formatter: logging.Formatter, message: str, *values: object) -> str:
    return formatter.format(logging.LogRecord("x", logging.INFO, "f", 1, message, values, None))


@pytest.mark.parametrize("name", [*hostile.UNPRINTABLE, *hostile.NAMES])
def test_a_log_line_stays_one_line(name: str) -> None:
    for formatter in (logs.TextFormatter(), logs.JsonFormatter()):
        line = formatted(formatter, "released %s", name)
        assert line.isprintable()
        assert len(line.splitlines()) == 1
    assert json.loads(formatted(logs.JsonFormatter(), "released %s", name))["message"] == f"released {name}"


@pytest.mark.parametrize("name", hostile.UNPRINTABLE)
def test_an_exception_adds_printable_lines_only(name: str) -> None:
    error = ValueError(name)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), (type(error), error, None))
    lines = logs.TextFormatter().format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[1].startswith("ValueError: ")


def test_a_path_cannot_forge_a_log_line(open_client: FlaskClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        open_client.get("/x%0d%0a2026-01-01 INFO released%1b[2J", headers={"User-Agent": "a\tb"})
    assert caplog.messages
    assert all(message.isprintable() for message in caplog.messages)


def test_every_log_line_of_the_manager_is_printable(
    manager: GPUResourceManager, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for name in hostile.UNPRINTABLE:  # of missing leases: these names reach the log unchecked
            manager.release_resources(name)
            manager.cancel(name)
            manager.status_of(name)
    assert caplog.messages
    assert all(message.isprintable() for message in caplog.messages)


@pytest.fixture
def printed() -> Callable[[Any], str]:
    """Return a function that renders a table as for a terminal with all features."""

    def show(renderable: Any) -> str:
        stream = io.StringIO()
        found = tables.console()
        wide = Console(
            file=stream,
            force_terminal=True,
            width=300,
            highlight=False,
            markup=found._markup,
            emoji=found._emoji,
        )
        wide.print(renderable)
        return stream.getvalue()

    return show


@pytest.mark.parametrize("name", [*hostile.MARKUP, *hostile.PAGES, *hostile.TEMPLATES])
def test_tables_show_a_name_unchanged(
    name: str, manager: GPUResourceManager, printed: Callable[[Any], str]
) -> None:
    manager.allocate_resources(name, 8, 1, owner=name, team=name)
    for number in range(3):
        manager.allocate_resources(f"fill-{number}", 8, 1)
    manager.submit(f"{name}!", 8, 1)
    manager.drain(3, reason=name)
    leases = printed(tables.leases_table(manager.leases(), 0.0))
    assert leases.count(name) == 3
    assert f"{name}!" in printed(tables.queue_table(manager.queue()))
    assert name in printed(tables.history_table(manager.history(), defaultdict(dict)))
    assert name in tables.lease_line(manager.leases()[0])
    assert "\x1b]8" not in leases  # no link


def test_an_error_of_the_command_line_is_one_printable_line() -> None:
    for name in hostile.UNPRINTABLE:
        if "\0" in name:  # no program can get one as an argument
            continue
        result = CliRunner().invoke(
            main, ["--store", "memory://", "allocate", name, "--gpus", "2", "--cpus", "1"]
        )
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.rstrip("\n").isprintable()
