"""Attacks on the service: replays, oversized input and attempts to read secrets."""

from __future__ import annotations

import gzip
import hmac
import re
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from flask.sessions import SecureCookieSessionInterface
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.errors import StoreUnavailableError
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence
from resource_manager.rest.auth import TOKEN_CACHE_S
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.builders import Clock
from tests.rest.test_routes import Failing, served_from
from tests.security import hostile

AsRole = Callable[..., FlaskClient]
BODY = {"task_id": "t", "required_gpus": 2, "required_cpus": 1}


def test_an_old_fencing_token_ends_no_lease(as_role: AsRole) -> None:
    ada = as_role(Role.USER, "ada")
    old = ada.post("/api/allocate", json=BODY).json["fencing_token"]  # type: ignore[index]
    assert ada.post("/api/release", json={"task_id": "t", "fencing_token": old}).status_code == 200
    new = ada.post("/api/allocate", json=BODY).json["fencing_token"]  # type: ignore[index]
    assert new > old
    for path in ("/api/release", "/api/renew"):
        for token in (old, 0, new + 1):
            assert ada.post(path, json={"task_id": "t", "fencing_token": token}).status_code == 404
    assert ada.get("/api/task?task_id=t").json["fencing_token"] == new  # type: ignore[index]


def test_fencing_tokens_grow_over_a_reset(as_role: AsRole) -> None:
    operator = as_role(Role.OPERATOR)
    old = operator.post("/api/allocate", json=BODY).json["fencing_token"]  # type: ignore[index]
    operator.post("/api/reset", json={"confirm": True})
    new = operator.post("/api/allocate", json=BODY).json["fencing_token"]  # type: ignore[index]
    assert new > old


def test_a_rotated_token_and_its_session_are_refused(
    service: Service, kept: Persistence, clock: Clock
) -> None:
    app = create_app(service)
    text = tokens.create(kept.tokens, "ada", Role.OPERATOR)
    browser, script = app.test_client(), app.test_client()
    script.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
    assert browser.post("/login", data={"token": text}).status_code == 303
    page = browser.get("/").get_data(as_text=True)
    csrf = re.search(r'data-csrf="([^"]+)"', page)
    assert csrf is not None
    kept.tokens.delete(text.split("_")[1])
    tokens.create(kept.tokens, "ada", Role.OPERATOR)
    clock.now += 2 * TOKEN_CACHE_S
    assert script.get("/api/status").status_code == 401
    assert browser.get("/api/status").status_code == 401
    headers = {"X-CSRF-Token": csrf[1]}
    assert browser.post("/api/allocate", json=BODY, headers=headers).status_code == 401


def test_a_cookie_of_another_service_is_refused(service: Service, kept: Persistence) -> None:
    """Sessions are signed: neither an invented one nor one with another signature is accepted."""
    text = tokens.create(kept.tokens, "ada", Role.OPERATOR)
    app = create_app(service)
    mine = app.test_client()
    mine.post("/login", data={"token": text})
    cookie = mine.get_cookie("gpu_manager_session")
    assert cookie is not None
    assert isinstance(app.session_interface, SecureCookieSessionInterface)
    forged = app.session_interface.get_signing_serializer(app)
    assert forged is not None
    forged.secret_keys = [b"guess"]
    for value in (forged.dumps({"token_id": text.split("_")[1]}), cookie.value[:-2], "e30.x.y"):
        other = app.test_client()
        other.set_cookie("gpu_manager_session", str(value))
        assert other.get("/api/status").status_code == 401


@pytest.mark.parametrize("path", ["/act/servers/drain", "/act/servers/resume", "/logout"])
def test_an_action_of_the_console_needs_its_csrf_token(
    path: str, service: Service, kept: Persistence
) -> None:
    text = tokens.create(kept.tokens, "ada", Role.OPERATOR)
    browser = create_app(service).test_client()
    browser.post("/login", data={"token": text})
    for form in ({}, {"csrf_token": ""}, {"csrf_token": "x.y.z"}):
        assert browser.post(path, data=form).status_code == 403
    assert browser.post(path, json={"csrf_token": "x"}).status_code == 403
    assert browser.get(path).status_code == 405


def test_secrets_are_compared_in_constant_time(kept: Persistence, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tokens.create(kept.tokens, "ada", Role.USER)
    compared: list[tuple[str, str]] = []
    compare = hmac.compare_digest

    def counting(first: str, second: str) -> bool:
        compared.append((first, second))
        return compare(first, second)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    known = kept.tokens.read()
    assert tokens.find(known, text) is not None
    for wrong in (text[:-1], "gpm_unknown_x", "", "x", "gpm_" + "a" * 10_000):
        assert tokens.find(known, wrong) is None
    assert len(compared) == 6  # also if there is no such token
    assert all(len(first) == len(second) == 64 for first, second in compared)


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 500_000,
        b'{"task_id":' * 80_000,
        b'{"labels": {"a": ' + b'{"a":' * 50_000,
        b'{"required_gpus": ' + b"9" * 900_000 + b"}",
        b'{"required_gpus": 1e' + b"9" * 900_000 + b"}",
        b'{"task_id": "' + b"a" * 900_000 + b'"}',
        b'{"task_id": "' + b"\\ud800" * 1000 + b'"}',
        b'{"requests": [' + b"{}," * 300_000 + b"{}]}",
        b"{" + b",".join(b'"k%d": 1' % i for i in range(60_000)) + b"}",
    ],
    ids=lambda bomb: bomb[:20].decode(),
)
def test_a_json_bomb_is_refused_quickly(
    bomb: bytes, open_client: FlaskClient, manager: GPUResourceManager
) -> None:
    version = manager.get_resource_summary()["version"]
    began = time.process_time()
    for path in ("/api/allocate", "/api/allocate/batch", "/api/renew"):
        response = open_client.post(path, data=bomb, content_type="application/json")
        assert response.status_code == 400
        assert len(response.data) < 50_000
    assert time.process_time() - began < 5
    assert manager.get_resource_summary()["version"] == version


def test_a_compressed_body_is_not_unpacked(open_client: FlaskClient) -> None:
    packed = gzip.compress(b" " * 50_000_000)
    response = open_client.post(
        "/api/allocate", data=packed, content_type="application/json", headers={"Content-Encoding": "gzip"}
    )
    assert response.status_code == 415
    assert "without Content-Encoding: gzip" in response.text


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded"])
def test_a_body_above_the_limit_is_refused(as_role: AsRole, content_type: str) -> None:
    for path, role in (("/api/allocate", Role.USER), ("/login", None)):
        answer = as_role(role).post(path, data=b"x" * (2**20 + 1), content_type=content_type)
        assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/login", "/act/release", "/act/servers/drain"])
def test_a_form_above_its_smaller_limit_is_refused_on_a_page(path: str, as_role: AsRole) -> None:
    """Before the log-in anybody may send one, and a form of a megabyte takes half a second to read."""
    answer = as_role(None if path == "/login" else Role.OPERATOR).post(path, data={"reason": "x" * 2**16})
    assert (answer.status_code, answer.mimetype) == (413, "text/html")
    assert "the body may have at most 65,536 bytes" in answer.text


def test_a_long_query_is_refused(open_client: FlaskClient) -> None:
    for path in ("/leases?q=", "/?q=", "/queue?q=", "/api/task?task_id="):
        assert open_client.get(path + "a" * 100_000).status_code == 400


def test_an_internal_error_reveals_nothing_to_the_caller(
    kept: Persistence,
) -> None:
    error = RuntimeError("redis://:hunter2@db /srv/app/secret.py")
    with served_from(Failing(error), kept) as caller:
        response = caller.post("/api/allocate", json=BODY)
    text = response.get_data(as_text=True)
    assert response.status_code == 500
    for word in ("hunter2", "Traceback", ".py", "RuntimeError", "redis"):
        assert word not in text


def test_the_health_check_does_not_reveal_the_address_of_the_store(as_role: AsRole, service: Service) -> None:
    def gone(*args: object) -> None:
        raise StoreUnavailableError("Redis at redis://admin@10.0.0.7:6379/0: cannot be reached")

    object.__setattr__(service, "watch", Mock(wraps=service.watch, check=gone))
    response = as_role(None).get("/healthz")
    assert response.status_code == 503
    assert "10.0.0.7" not in response.get_data(as_text=True)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../../settings.py",
        "/static/%2e%2e/%2e%2e/settings.py",
        "/static//etc/passwd",
        "/static/..%5c..%5csettings.py",
        "/static/console.js/../../app.py",
    ],
)
def test_only_static_files_are_served(path: str, open_client: FlaskClient) -> None:
    response = open_client.get(path, follow_redirects=True)
    assert response.status_code == 404
    response.close()


@pytest.mark.parametrize("name", hostile.PAGES)
def test_a_page_escapes_every_name(name: str, open_client: FlaskClient) -> None:
    labels = {"dag_id": name, "run_id": name, "task_id": name, "launcher": name}
    payload = {"task_id": name, "required_gpus": 8, "required_cpus": 1, "team": name, "owner": name}
    assert open_client.post("/api/allocate", json={**payload, "labels": labels}).status_code == 200
    for number in range(3):
        open_client.post("/api/allocate", json={**payload, "task_id": f"{name}{number}"})
    assert open_client.post("/api/submit", json={**payload, "task_id": f"{name} waits"}).status_code == 200
    assert open_client.post("/api/servers/0/drain", json={"reason": name}).status_code == 200
    paths = ("/", "/leases", "/queue", "/docs", "/charts", "/what-if", "/events-are-not-a-page")
    for path in paths:
        for query in ("", f"?q={name}&required_gpus={name}&state={name}"):
            page = open_client.get(path + query).get_data(as_text=True)
            if re.search(r"[<>\"']", name):
                assert name not in page
            assert 'href="javascript:' not in page
