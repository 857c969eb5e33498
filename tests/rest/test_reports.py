"""`POST /api/reports`: who may send which reports, what else an agent's token may do, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.rest import api, tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.console import pages
from resource_manager.rest.routing import Route
from resource_manager.rest.tokens import Role, TokenError
from tests.agent.reporting import as_text, gpu, report, server

OWN = ("/api/reports", "/api/agent/jobs", "/api/agent/logs")
OTHER_ROUTES = [route for route in (*api.routes.all, *pages.routes.all) if route.path not in OWN]
PROTECTED = [route for route in OTHER_ROUTES if route.role is not None]

Reporting = Callable[..., FlaskClient]


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://", inventory=[server("gpu-a"), server("gpu-b")]) as manager:
        yield manager


@pytest.fixture
def agent_of(manager: GPUResourceManager, kept: Persistence) -> Iterator[Reporting]:
    """Return agent_of("gpu-a"): a client with the agent token of that server."""
    service = standalone(manager, kept)
    app = create_app(service)

    def client(name: str) -> FlaskClient:
        made = app.test_client()
        text = tokens.create(kept.tokens, f"agent of {name}", Role.AGENT, server=name)
        made.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
        return made

    yield client
    service.watch.close()


def now(manager: GPUResourceManager) -> float:
    return manager.store.now()


def send(client: FlaskClient, value: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = client.post("/api/reports", data=as_text(value), content_type="application/json")
    assert answer.json is not None
    return answer.status_code, answer.json


def test_an_agent_reports_its_server(agent_of: Reporting, manager: GPUResourceManager) -> None:
    status, answer = send(agent_of("gpu-a"), report(now(manager), gpu(0), gpu(1)))
    assert (status, answer) == (200, {"server": "gpu-a", "watched": True, "cleaning": []})
    assert manager.get_resource_summary()["servers"][0]["watched"]


def test_an_agent_reports_no_other_server(agent_of: Reporting, manager: GPUResourceManager) -> None:
    status, answer = send(agent_of("gpu-b"), report(now(manager), gpu(0), gpu(1)))
    assert (status, answer["detail"]) == (403, "this token is of server gpu-b; the report is of gpu-a")
    assert manager.history() == []


@pytest.mark.parametrize("route", PROTECTED, ids=lambda route: f"{route.method} {route.path}")
def test_an_agent_may_do_nothing_else(route: Route, agent_of: Reporting, manager: GPUResourceManager) -> None:
    path = re.sub(r"<int:\w+>", "1", route.path)
    body: object = None if route.method == "GET" or route.page else {}
    answer = agent_of("gpu-a").open(path, method=route.method, json=body)
    assert answer.status_code == 403
    assert manager.history() == []


def test_only_agents_report(agent_of: Reporting, manager: GPUResourceManager, kept: Persistence) -> None:
    client = agent_of("gpu-a")
    value = report(now(manager), gpu(0), gpu(1))
    for role in (Role.READER, Role.USER, Role.OPERATOR):
        text = tokens.create(kept.tokens, "ada", role)
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
        assert send(client, value)[0] == 403
    del client.environ_base["HTTP_AUTHORIZATION"]
    status, answer = send(client, value)
    assert (status, answer["title"]) == (401, "Authentication required")
    assert manager.history() == []


def test_an_agents_token_logs_nobody_in(agent_of: Reporting) -> None:
    client = agent_of("gpu-a")
    text = client.environ_base.pop("HTTP_AUTHORIZATION").removeprefix("Bearer ")
    assert client.post("/login", data={"token": text}).status_code == 403
    assert client.get("/api/status").status_code == 401


def test_an_open_service_takes_reports(open_client: FlaskClient) -> None:
    status, answer = send(open_client, report(0.0, gpu(0), name="gpu-z"))
    assert status == 400, "it read the report: of another day, by the clock"
    assert "store's time" in answer["detail"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"server": "gpu-z"}, "403"),
        ({"format": 2}, "upgrade the service before the servers"),
        ({"gpus": [gpu(0)] * 10_000}, "10,000 GPUs; a server has at most"),
        ({"load_1m": float("nan")}, "load_1m"),
        ({"at": 1e9}, "before the store's time"),
        ({"gpus": "many"}, "gpus"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_wrong_report_is_refused_in_one_line_and_changes_nothing(
    agent_of: Reporting, manager: GPUResourceManager, change: dict[str, Any], said: str
) -> None:
    status, answer = send(agent_of("gpu-a"), {**report(now(manager), gpu(0), gpu(1)), **change})
    assert status in (400, 403)
    assert said in f"{status} {answer['detail']}"
    assert "\n" not in answer["detail"]
    assert manager.history() == []
    assert manager.store.reports.reports(["gpu-a", "gpu-z"]) == {}


def test_a_report_of_a_server_that_the_inventory_lacks_is_refused(
    agent_of: Reporting, manager: GPUResourceManager
) -> None:
    status, answer = send(agent_of("gpu-z"), report(now(manager), gpu(0), name="gpu-z"))
    assert status == 400
    assert "gpu-z" in answer["detail"]
    assert manager.store.reports.reports(["gpu-z"]) == {}


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b" " * (9 * 2**20), "application/json", 413),
    ],
)
def test_a_body_that_is_no_report_is_refused(
    agent_of: Reporting, data: bytes, kind: str, status: int
) -> None:
    answer = agent_of("gpu-a").post("/api/reports", data=data, content_type=kind)
    assert answer.status_code == status


def test_a_token_of_an_agent_names_its_server(kept: Persistence) -> None:
    with pytest.raises(TokenError, match="role agent names the server"):
        tokens.create(kept.tokens, "a", Role.AGENT)
    with pytest.raises(TokenError, match="other tokens name none"):
        tokens.create(kept.tokens, "a", Role.USER, server="gpu-a")
