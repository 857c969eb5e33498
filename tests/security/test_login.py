"""Log-in and sessions: who may begin one, who may shut others out, and when one is over."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.rest import sessions, tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.redis_persistence import RedisSessions
from resource_manager.rest.service import Service
from resource_manager.rest.sessions import MAX_SESSIONS, SESSION_LIFE_S, MemorySessions, SessionFile
from resource_manager.rest.signing import CLOCKS_DIFFER_S
from resource_manager.rest.sql_persistence import SqlSessions
from resource_manager.rest.tokens import Role
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.sql.database import Database
from tests.builders import Clock
from tests.sql_servers import DATABASES

AsRole = Callable[..., FlaskClient]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},  # over plain HTTP browsers send no Sec-Fetch-Site
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://[v.]"},
        {"Origin": "http://localhost:8080"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_a_page_elsewhere_cannot_log_a_browser_in(
    headers: dict[str, str], as_role: AsRole, kept: Persistence
) -> None:
    text = tokens.create(kept.tokens, "mallory", Role.READER)
    browser = as_role(None)
    assert browser.post("/login", data={"token": text}, headers=headers).status_code == 403
    assert browser.get("/").status_code == 303
    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    assert browser.post("/login", data={"token": text}, headers=own).status_code == 303
    assert browser.get("/").status_code == 200


def test_who_is_logged_in_and_mistypes_a_token_may_try_again_on_that_page(
    service: Service, kept: Persistence
) -> None:
    browser = create_app(service).test_client()
    text = tokens.create(kept.tokens, "ada", Role.USER)
    assert browser.post("/login", data={"token": text}).status_code == 303
    page = browser.get("/login").get_data(as_text=True)
    for token, status in (("mistyped", 401), (text, 303)):
        [csrf, *_] = re.findall(r'name="csrf_token" value="([^"]+)"', page)
        answer = browser.post("/login", data={"token": token, "csrf_token": csrf})
        assert answer.status_code == status
        page = answer.get_data(as_text=True)


@pytest.mark.parametrize(
    ("wanted", "destination"),
    [("/lease?id=a/b&x=%22", "/lease?id=a/b&x=%22"), ("//evil.example", "/"), ("", "/")],
)
def test_a_log_in_by_token_leads_to_the_page_that_was_asked_for(
    service: Service, kept: Persistence, wanted: str, destination: str
) -> None:
    browser = create_app(service).test_client()
    text = tokens.create(kept.tokens, "ada", Role.USER)
    answer = browser.get("/login", query_string={"next": wanted})
    for token in ("mistyped", text):
        fields = re.findall(r'name="next" value="([^"]*)"', answer.get_data(as_text=True))
        answer = browser.post("/login", data={"token": token, "next": html.unescape("".join(fields))})
    assert (answer.status_code, answer.headers["Location"]) == (303, destination)


@pytest.mark.parametrize(
    ("came_from", "destination"),
    [
        ("http://localhost/servers/0?x=1", "/servers/0?x=1"),
        ("http://localhost/act/hold?name=0", "/"),
        ("http://[", "/"),
        ("", "/"),
    ],
)
def test_a_form_of_a_session_that_is_over_says_that_it_did_nothing(
    service: Service, kept: Persistence, came_from: str, destination: str
) -> None:
    """The log-in page came, then the overview, and no word that the server was not drained."""
    browser = create_app(service).test_client()
    text = tokens.create(kept.tokens, "olga", Role.OPERATOR)
    browser.post("/login", data={"token": text})
    with browser.session_transaction() as session:
        kept.sessions.end(session["token_id"], session["session_id"])
    drained = browser.post(
        "/act/servers/drain", data={"server": "gpu-server-0"}, headers={"Referer": came_from}
    )
    page = browser.get(drained.headers["Location"]).get_data(as_text=True)
    assert "Nothing was done: you are not logged in any more." in page
    wanted = html.unescape("".join(re.findall(r'name="next" value="([^"]*)"', page)))
    answer = browser.post("/login", data={"token": text, "next": wanted})
    assert (answer.status_code, answer.headers["Location"]) == (303, destination)
    with browser.session_transaction() as session:
        kept.sessions.end(session["token_id"], session["session_id"])
    assert "Nothing" not in browser.post("/logout", follow_redirects=True).get_data(as_text=True)


def test_wrong_tokens_from_one_browser_shut_nobody_out(service: Service, kept: Persistence) -> None:
    """One address is often that of many: of an office, or of the proxy in front."""
    app = create_app(service)
    text = tokens.create(kept.tokens, "ada", Role.USER)
    browser = app.test_client()
    assert browser.post("/login", data={"token": text}).status_code == 303
    victim = app.test_client()
    elsewhere = {"Origin": "http://evil.example"}
    statuses = [victim.post("/login", data={"token": "x"}, headers=elsewhere).status_code for _ in range(25)]
    assert statuses == [403] * 25  # not even counted
    statuses = [victim.post("/login", data={"token": "x"}).status_code for _ in range(25)]
    assert statuses == [401] * 20 + [429] * 5
    assert victim.get("/healthz").status_code == 200
    assert victim.get("/login").status_code == 200
    bearer = {"Authorization": f"Bearer {text}"}
    assert app.test_client().get("/api/status", headers=bearer).status_code == 200
    assert browser.get("/").status_code == 200
    assert victim.get("/api/status", headers={"Authorization": "Bearer x"}).status_code == 429
    assert victim.post("/login", data={"token": text}).status_code == 303


def test_a_locked_out_address_does_not_reach_the_token_store(
    manager: GPUResourceManager, kept: Persistence, clock: Clock
) -> None:
    store = Mock(wraps=kept.tokens)
    service = standalone(manager, replace(kept, tokens=store), clock=clock)
    client = create_app(service).test_client()
    for _ in range(20):
        client.get("/api/status", headers={"Authorization": "Bearer gpm_1_2"})
    before = store.read.call_count
    for _ in range(20):
        client.get("/api/status", headers={"Authorization": "Bearer gpm_1_2"})
    service.watch.close()
    assert store.read.call_count == before > 0


@pytest.mark.parametrize("token", ["wrong", "expired", "session"])
@pytest.mark.parametrize("path", ["/livez", "/login", "/nowhere", "/api/status"])
def test_no_stranger_has_the_tokens_read_at_each_call(
    manager: GPUResourceManager, kept: Persistence, clock: Clock, token: str, path: str
) -> None:
    """Where nothing is needed of the caller, and with what was good once: nobody counts these calls."""
    store = Mock(wraps=kept.tokens)
    service = standalone(manager, replace(kept, tokens=store), clock=clock)
    client = create_app(service).test_client()
    text = tokens.create(kept.tokens, "mallory", Role.READER, expires_s=60.0, now=clock)
    if token == "session":
        assert client.post("/login", data={"token": text}).status_code == 303
        kept.tokens.delete(text.split("_")[1])
    else:
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {'gpm_1_2' if token == 'wrong' else text}"
    clock.now += 61.0
    before = store.read.call_count
    statuses = {client.get(path, headers={"Accept": "text/html"}).status_code for _ in range(30)}
    service.watch.close()
    assert statuses <= {200, 303, 401, 404, 429}
    wrong_ones = 20 if (token, path) == ("wrong", "/api/status") else 1  # these are counted
    assert store.read.call_count - before <= (0 if path == "/livez" else 1 + wrong_ones)


def test_a_service_shows_that_it_lives_while_its_tokens_cannot_be_read(
    manager: GPUResourceManager, kept: Persistence
) -> None:
    store = Mock(wraps=kept.tokens)
    service = standalone(manager, replace(kept, tokens=store))
    client = create_app(service).test_client()
    store.read.side_effect = AssertionError("a store that hangs")
    for headers in ({}, {"Authorization": "Bearer gpm_1_2"}):
        assert client.get("/livez", headers=headers).status_code == 200
    assert client.get("/healthz").status_code == 200, "without a token none is looked for"
    service.watch.close()


def test_a_name_that_is_an_address_shares_no_limit_with_it(
    manager: GPUResourceManager, kept: Persistence
) -> None:
    service = standalone(manager, kept, rate="5/hour")
    app = create_app(service)
    text = tokens.create(kept.tokens, "127.0.0.1", Role.READER)
    stranger = app.test_client()
    assert [stranger.get("/healthz").status_code for _ in range(6)] == [200] * 5 + [429]
    assert (
        app.test_client().get("/api/status", headers={"Authorization": f"Bearer {text}"}).status_code == 200
    )
    service.watch.close()


def cookie_of(browser: FlaskClient) -> str:
    cookie = browser.get_cookie("gpu_manager_session")
    assert cookie is not None
    return str(cookie.value)


def log_out(browser: FlaskClient) -> None:
    csrf = re.search(r'data-csrf="([^"]+)"', browser.get("/").get_data(as_text=True))
    assert csrf is not None
    assert browser.post("/logout", data={"csrf_token": csrf[1]}).status_code == 303


def test_a_stolen_cookie_is_worth_nothing_after_the_log_out(service: Service, kept: Persistence) -> None:
    app = create_app(service)
    text = tokens.create(kept.tokens, "ada", Role.OPERATOR)
    browser, other, thief = (app.test_client() for _ in range(3))
    assert browser.post("/login", data={"token": text}).status_code == 303
    assert other.post("/login", data={"token": text}).status_code == 303
    thief.set_cookie("gpu_manager_session", cookie_of(browser))
    assert thief.get("/api/status").status_code == 200
    log_out(browser)
    assert thief.get("/api/status").status_code == 401
    assert other.get("/api/status").status_code == 200  # another session of the same token


def test_a_second_log_in_ends_the_session_before(service: Service, kept: Persistence) -> None:
    app = create_app(service)
    text = tokens.create(kept.tokens, "ada", Role.READER)
    browser, thief = app.test_client(), app.test_client()
    browser.post("/login", data={"token": text})
    thief.set_cookie("gpu_manager_session", cookie_of(browser))
    assert browser.post("/login", data={"token": text}).status_code == 403  # a change by cookie
    csrf = re.search(r'name="csrf_token" value="([^"]+)"', browser.get("/login").get_data(as_text=True))
    assert csrf is not None
    again = browser.post("/login", data={"token": text, "csrf_token": csrf[1]})
    assert again.status_code == 303
    assert browser.get("/api/status").status_code == 200
    assert thief.get("/api/status").status_code == 401


def test_what_one_service_signs_is_good_at_another_whose_clock_is_behind(
    service: Service, kept: Persistence, set_wall_clock: Any
) -> None:
    """Services of one store that a proxy spreads the calls over are on machines of their own."""
    browser = create_app(service).test_client()
    text = tokens.create(kept.tokens, "ada", Role.READER)
    for ahead_s, status in ((CLOCKS_DIFFER_S - 5, 200), (CLOCKS_DIFFER_S + 5, 401)):
        set_wall_clock(lambda now, ahead_s=ahead_s: now + ahead_s)
        assert browser.post("/login", data={"token": text}).status_code == 303
        page = browser.get("/").get_data(as_text=True)
        set_wall_clock(lambda now: now)
        assert browser.get("/api/status").status_code == status
        if status == 200:
            [csrf] = re.findall(r'data-csrf="([^"]+)"', page)
            assert browser.post("/logout", data={"csrf_token": csrf}).status_code == 303
    set_wall_clock(lambda now: now + SESSION_LIFE_S + CLOCKS_DIFFER_S + 6)
    assert browser.get("/api/status").status_code == 401, "and it ends when it did before"


@pytest.fixture(params=["memory", "file", "redis", "sqlite", *DATABASES])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """Return a store of sessions and a clock to move."""
    now = [1_000_000.0]
    if request.param == "memory":
        return MemorySessions(lambda: now[0]), now
    if request.param == "file":
        return SessionFile(tmp_path / "sessions.json", lambda: now[0]), now
    if request.param == "redis":
        url = request.getfixturevalue("embedded_redis").fresh_url()
        return RedisSessions(RedisClient.from_url(url), lambda: now[0]), now
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/state.db"
    else:
        url = request.getfixturevalue(request.param).fresh_url()
    return SqlSessions(Database(url), lambda: now[0]), now


def test_sessions_end_by_time_and_are_bounded(store: Any) -> None:
    kept, now = store
    assert not kept.is_live("t", "0")
    assert not kept.is_live("", "")
    for number in range(MAX_SESSIONS + 1):
        kept.begin("t", str(number))
        now[0] += 1
    kept.begin("other", "x")
    live = [number for number in range(MAX_SESSIONS + 1) if kept.is_live("t", str(number))]
    assert live == list(range(1, MAX_SESSIONS + 1))
    kept.end("t", "5")
    kept.end("t", "5")
    assert not kept.is_live("t", "5")
    assert kept.is_live("t", "6")
    now[0] += SESSION_LIFE_S
    assert not kept.is_live("t", str(MAX_SESSIONS))
    kept.begin("t", "new")
    for number in range(MAX_SESSIONS):
        now[0] += 1
        kept.begin("other", str(number))
    kept.begin("t", "newer")
    assert kept.is_live("t", "new"), "sessions are counted for each token by itself"


def test_a_cookie_expires_with_its_session(service: Service) -> None:
    assert create_app(service).permanent_session_lifetime.total_seconds() == sessions.SESSION_LIFE_S
