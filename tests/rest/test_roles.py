"""Roles: every route, called without a token and as reader, user and operator."""

from __future__ import annotations

import re
from collections.abc import Callable

import flask
import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.rest import api
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.auth import TOKEN_CACHE_S
from resource_manager.rest.console import pages
from resource_manager.rest.routing import Route
from resource_manager.rest.tokens import Role, create
from tests.builders import Clock, json_of

ALL = [*api.routes.all, *pages.routes.all]
HEALTH = ("/livez", "/readyz", "/healthz")
SIGN_ON = {("GET", "/sign-on"), ("GET", "/signed-on"), ("POST", "/api/login"), ("POST", "/api/login/token")}
OPEN_TO_STRANGERS = {*(("GET", path) for path in HEALTH), ("GET", "/login"), ("POST", "/login"), *SIGN_ON}

AsRole = Callable[..., FlaskClient]


def call(client: FlaskClient, route: Route) -> int:
    path = re.sub(r"<int:\w+>", "1", route.path)
    if route.path == "/events":
        response = client.open(path, method=route.method)
        response.close()
        return response.status_code
    body: object = None if route.method == "GET" or route.page else {}
    return client.open(path, method=route.method, json=body).status_code


@pytest.mark.parametrize("route", ALL, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_admits_exactly_the_roles_it_declares(route: Route, as_role: AsRole) -> None:
    stranger = call(as_role(None), route)
    if (route.method, route.path) in OPEN_TO_STRANGERS:
        assert route.role is None
        assert stranger in ((404, 400) if (route.method, route.path) in SIGN_ON else (200, 401))
        return
    assert route.role is not None
    assert stranger == (303 if route.page else 401)
    for role in Role:
        status = call(as_role(role), route)
        if not role.includes(route.role):
            assert status == 403
        else:
            assert status not in (401, 403, 405, 500), status


def test_a_lower_role_changes_nothing(as_role: AsRole, manager: GPUResourceManager) -> None:
    version = manager.get_resource_summary()["version"]
    reader, user = as_role(Role.READER), as_role(Role.USER)
    payload = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}
    for path in ("/api/allocate", "/api/submit"):
        assert reader.post(path, json=payload).status_code == 403
    for path in (
        "/api/servers/0/drain",
        "/api/servers/0/resume",
        "/api/servers/0/adopt",
        "/api/servers/0/searched",
    ):
        assert user.post(path).status_code == 403
    assert user.post("/api/reset", json={"confirm": True}).status_code == 403
    assert manager.get_resource_summary()["version"] == version


def test_a_batch_with_a_lease_of_another_owner_is_refused_that_one(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    shape = {"required_gpus": 2, "required_cpus": 1}
    batch = {"requests": [{"task_id": "fresh", **shape}, {"task_id": "adas", **shape}]}
    as_role(Role.USER, "ada").post("/api/allocate", json={"task_id": "adas", **shape})
    answer = as_role(Role.USER, "bob").post("/api/allocate/batch", json=batch)
    fresh, adas = answer.json["results"]  # type: ignore[index]
    assert (fresh["task_id"], fresh["owner"], adas) == ("fresh", "bob", None)
    assert answer.json["refusals"][1]["kind"] == "task_taken"  # type: ignore[index]
    assert [lease["task_id"] for lease in manager.leases()] == ["adas", "fresh"]


def test_only_the_owner_or_an_operator_ends_a_lease(as_role: AsRole) -> None:
    ada, bob, operator = as_role(Role.USER, "ada"), as_role(Role.USER, "bob"), as_role(Role.OPERATOR)
    payload = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}
    lease = ada.post("/api/allocate", json=payload).json
    assert lease is not None
    assert lease["owner"] == "ada"
    for path in ("/api/release", "/api/renew"):
        assert bob.post(path, json={"task_id": "t"}).status_code == 403
    refused = bob.post("/api/allocate", json=payload)
    assert refused.status_code == 409
    assert str(lease["fencing_token"]) not in refused.get_data(as_text=True)
    assert bob.post("/api/allocate", json={**payload, "task_id": "u", "owner": "ada"}).status_code == 403
    assert ada.post("/api/renew", json={"task_id": "t"}).status_code == 200
    assert ada.post("/api/release", json={"task_id": "t", "fencing_token": 99}).status_code == 404
    assert operator.post("/api/release", json={"task_id": "t"}).status_code == 200


def test_only_the_owner_or_an_operator_cancels_a_pending_request(as_role: AsRole) -> None:
    ada, bob = as_role(Role.USER, "ada"), as_role(Role.USER, "bob")
    for i in range(4):
        ada.post("/api/allocate", json={"task_id": f"t{i}", "required_gpus": 8, "required_cpus": 1})
    payload = {"task_id": "w", "required_gpus": 8, "required_cpus": 1}
    assert ada.post("/api/submit", json=payload).json["state"] == "WAITING"  # type: ignore[index]
    assert bob.post("/api/cancel", json={"task_id": "w"}).status_code == 403
    assert ada.post("/api/release", json={"task_id": "w"}).status_code == 404
    assert ada.post("/api/cancel", json={"task_id": "w"}).status_code == 200


def test_only_the_owner_or_an_operator_withdraws_what_is_announced(as_role: AsRole) -> None:
    ada, bob = as_role(Role.USER, "ada"), as_role(Role.USER, "bob")
    demand = {"task_id": "d/r/t", "gpus": 2, "after": ["d/r/s"], "copies": 0}
    assert ada.post("/api/announce", json=demand).json == {"announced": True}
    assert bob.post("/api/announce", json={**demand, "owner": "ada"}).status_code == 403
    gone = {"task_ids": ["d/r/t"]}
    assert bob.post("/api/withdraw", json=gone).json == {"withdrawn": 0}
    assert [each["owner"] for each in bob.get("/api/coming").json["items"]] == ["ada"]  # type: ignore[index]
    assert ada.post("/api/withdraw", json=gone).json == {"withdrawn": 1}
    assert ada.post("/api/announce", json={**demand, "copies": -1}).status_code == 400


def test_wrong_and_revoked_tokens_are_refused(as_role: AsRole, kept: Persistence, clock: Clock) -> None:
    client = as_role(Role.READER)
    good = client.environ_base["HTTP_AUTHORIZATION"]
    assert client.get("/api/status").status_code == 200
    for header in (good[:-1], good + "x", "Bearer", "Bearer gpm__", "Basic " + good[7:], "bearer é"):
        client.environ_base["HTTP_AUTHORIZATION"] = header
        refused = client.get("/api/status")
        assert refused.status_code == 401, header
        assert "is not one of this service, or was revoked" in json_of(refused)["detail"]
        assert refused.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
    del client.environ_base["HTTP_AUTHORIZATION"]
    assert "a bearer token is needed" in json_of(client.get("/api/status"))["detail"]
    clock.now += 2 * TOKEN_CACHE_S
    for token_id in list(kept.tokens.read()):
        kept.tokens.delete(token_id)
    client.environ_base["HTTP_AUTHORIZATION"] = good
    assert client.get("/api/status").status_code == 401


def test_wrong_tokens_are_limited_by_address(as_role: AsRole) -> None:
    client = as_role(None)
    client.environ_base["HTTP_AUTHORIZATION"] = "Bearer gpm_1_2"
    statuses = [client.get("/api/status").status_code for _ in range(25)]
    assert statuses == [401] * 20 + [429] * 5


def test_calls_above_the_rate_limit_are_refused(manager: GPUResourceManager, kept: Persistence) -> None:
    service = standalone(manager, kept, open_to="loopback", rate="3/hour")
    client = create_app(service).test_client()
    responses = [client.get("/healthz") for _ in range(4)]
    service.watch.close()
    assert [response.status_code for response in responses] == [200, 200, 200, 429]
    assert int(responses[-1].headers["Retry-After"]) > 0


def log_in(client: FlaskClient, kept: Persistence, role: Role) -> None:
    text = create(kept.tokens, str(role), role)
    assert client.post("/login", data={"token": text}).status_code == 303


def csrf_of(client: FlaskClient) -> str:
    page = client.get("/").get_data(as_text=True)
    found = re.search(r'data-csrf="([^"]+)"', page)
    assert found is not None
    return found[1]


def test_a_change_by_cookie_needs_a_csrf_token(as_role: AsRole, kept: Persistence) -> None:
    client = as_role(None)
    log_in(client, kept, Role.OPERATOR)
    payload = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}
    assert client.post("/api/allocate", json=payload).status_code == 403
    assert client.post("/act/servers/drain", data={}).status_code == 403
    token = csrf_of(client)
    assert (
        client.post("/api/allocate", json=payload, headers={"X-CSRF-Token": token + "x"}).status_code == 403
    )
    assert client.post("/api/allocate", json=payload, headers={"X-CSRF-Token": token}).status_code == 200
    form = {"csrf_token": token, "server": "gpu-server-0"}
    assert client.post("/act/servers/drain", data=form).status_code == 303
    other = as_role(None)
    log_in(other, kept, Role.READER)
    assert (
        client.post("/api/allocate", json=payload, headers={"X-CSRF-Token": csrf_of(other)}).status_code
        == 403
    )
    assert client.post("/logout", data={"csrf_token": token}).status_code == 303
    assert client.get("/api/status").status_code == 401


def test_a_page_of_another_site_cannot_log_in(as_role: AsRole, kept: Persistence) -> None:
    text = create(kept.tokens, "mallory", Role.READER)
    client = as_role(None)
    headers = {"Sec-Fetch-Site": "cross-site"}
    assert client.post("/login", data={"token": text}, headers=headers).status_code == 403
    assert client.get("/").status_code == 303


def test_a_reader_sees_no_action_buttons(as_role: AsRole, kept: Persistence) -> None:
    as_role(Role.USER, "ada").post(
        "/api/allocate", json={"task_id": "t", "required_gpus": 2, "required_cpus": 1}
    )
    for role, buttons in ((Role.READER, False), (Role.OPERATOR, True)):
        client = as_role(None)
        log_in(client, kept, role)
        assert ("Drain" in client.get("/").get_data(as_text=True)) is buttons
        assert ("Release" in client.get("/leases").get_data(as_text=True)) is buttons


def test_an_open_service_answers_only_this_machine(open_client: FlaskClient) -> None:
    payload = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}
    assert open_client.get("/api/status", headers={"Host": "evil.example"}).status_code == 403
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert open_client.post("/api/allocate", json=payload, headers=headers).status_code == 403
    same = {"Origin": "http://localhost"}
    assert open_client.post("/api/allocate", json=payload, headers=same).status_code == 403  # no CSRF token
    assert open_client.post("/api/allocate", json=payload).status_code == 200


def test_every_page_has_security_headers(open_client: FlaskClient) -> None:
    for path in ("/", "/leases", "/nope", "/api/status", "/static/console.js"):
        response = open_client.get(path)
        headers = response.headers
        response.close()
        policy = headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_pages_have_no_inline_script_or_style(open_client: FlaskClient) -> None:
    for path in (
        "/",
        "/leases",
        "/queue",
        "/charts",
        "/what-if?required_gpus=2&required_cpus=1",
        "/docs",
        "/login",
    ):
        page = open_client.get(path).get_data(as_text=True)
        assert not re.search(r"<script(?![^>]* src=)|\sstyle=|<style|\son\w+=", page), path
        assert "http" not in re.sub(r'xmlns="[^"]*"', "", page).replace("http://localhost", ""), path


def test_user_input_is_escaped_in_pages(open_client: FlaskClient) -> None:
    evil = "<script>alert(1)</script>\"'"
    payload = {"task_id": evil, "required_gpus": 2, "required_cpus": 1, "team": evil, "owner": evil}
    assert open_client.post("/api/allocate", json=payload).status_code == 200
    assert open_client.post("/api/servers/0/drain", json={"reason": evil}).status_code == 200
    for path in ("/", "/leases", f"/?q={evil}", f"/what-if?required_gpus={evil}"):
        assert "<script>alert" not in open_client.get(path).get_data(as_text=True)


def test_every_route_of_the_app_is_declared(open_client: FlaskClient) -> None:
    declared = {(route.method, route.path) for route in ALL}
    app: flask.Flask = open_client.application
    found = {
        (method, rule.rule)
        for rule in app.url_map.iter_rules()
        if rule.endpoint != "gpu.static"
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert found == declared
