"""Tokens expire, are rotated, and show when they were used last, on each storage of them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager import GPUResourceManager, Settings
from resource_manager.errors import StoreUnavailableError
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, persistence_of, standalone
from resource_manager.rest.auth import TOKEN_CACHE_S, ExpiredTokenError, TokenAuthenticator
from resource_manager.rest.service import Service
from resource_manager.rest.sessions import MemorySessions
from resource_manager.rest.tokens import Role, TokenError, TokenFile, TokenStore
from tests.builders import Clock, json_of
from tests.rest.test_roles import HEALTH
from tests.sql_servers import DATABASES

DAY_S = 86_400.0


@pytest.fixture(params=["file", "redis", "sqlite", *DATABASES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TokenStore:
    if request.param == "file":
        return TokenFile(tmp_path / "tokens.json")
    name = "embedded_redis" if request.param == "redis" else request.param
    return persistence_of(Settings(store=request.getfixturevalue(name).fresh_url())).tokens


def bearer(text: str) -> Any:
    return SimpleNamespace(headers={"Authorization": f"Bearer {text}"})


def test_a_token_works_until_it_expires_and_then_says_so(store: TokenStore) -> None:
    clock = Clock()
    text = tokens.create(store, "ada", Role.USER, expires_s=90 * DAY_S, now=clock)
    service = TokenAuthenticator(store, MemorySessions(clock), clock)
    clock.now += 90 * DAY_S - 1
    assert service.identify(bearer(text)) is not None
    clock.now += 1
    with pytest.raises(ExpiredTokenError, match=r"of ada has expired: .* token rotate"):
        service.identify(bearer(text))
    assert service.identify(bearer(f"{text}x")) is None, "only who has its secret learns that it was one"


def test_the_last_use_is_noted_also_while_the_clock_is_set_back(store: TokenStore) -> None:
    clock = Clock()
    text = tokens.create(store, "ada", Role.USER, now=clock)
    service = TokenAuthenticator(store, MemorySessions(clock), clock)
    for _ in range(2):
        service.identify(bearer(text))
        assert store.last_uses() == {text.split("_")[1]: clock.now}
        clock.now -= DAY_S


def test_the_last_use_is_noted_once_in_a_while(store: TokenStore) -> None:
    clock = Clock()
    used, unused = (tokens.create(store, name, Role.USER, now=clock) for name in ("ada", "bob"))
    service = TokenAuthenticator(store, MemorySessions(clock), clock)
    first = clock.now
    for _ in range(3):
        service.identify(bearer(used))
        clock.now += tokens.USE_EVERY_S / 4
    used_id, unused_id = used.split("_")[1], unused.split("_")[1]
    assert store.last_uses() == {used_id: first}
    clock.now += tokens.USE_EVERY_S
    service.identify(bearer(used))
    assert store.last_uses() == {used_id: clock.now}
    assert set(store.read()) == {used_id, unused_id}


def test_a_use_brings_no_revoked_token_back(store: TokenStore) -> None:
    token_id = tokens.create(store, "ada", Role.USER).split("_")[1]
    assert store.delete(token_id)
    store.note_use(token_id, 1.0)
    assert store.read() == {}
    assert store.delete(token_id) is False


def test_a_rotated_token_has_the_rights_of_the_old_one_which_ends(store: TokenStore) -> None:
    clock = Clock()
    old = tokens.create(store, "ada", Role.USER, teams=["vision"], expires_s=30 * DAY_S, now=clock)
    store.note_use(old.split("_")[1], clock.now)
    clock.now += 20 * DAY_S
    new = tokens.rotate(store, old.split("_")[1], now=clock)
    (kept,) = store.read().values()
    assert (kept.name, kept.role, kept.teams, kept.created_at) == ("ada", "user", ("vision",), clock.now)
    assert kept.expires_at == clock.now + 30 * DAY_S, "it lives as long as the old one was made for"
    assert tokens.find(store.read(), new) == kept
    assert tokens.find(store.read(), old) is None
    assert store.last_uses().get(kept.token_id) is None


def test_with_an_overlap_both_work_for_that_time(store: TokenStore) -> None:
    clock = Clock()
    old = tokens.create(store, "gpu-a", Role.AGENT, server="gpu-a", now=clock)
    new = tokens.rotate(store, old.split("_")[1], expires_s=90 * DAY_S, overlap_s=DAY_S, now=clock)
    service = TokenAuthenticator(store, MemorySessions(clock), clock)
    assert service.agent_of(old) == service.agent_of(new) != None  # noqa: E711 - both are the same agent
    clock.now += DAY_S
    assert service.agent_of(new) is not None
    with pytest.raises(ExpiredTokenError):
        service.agent_of(old)


def test_an_overlap_lengthens_no_token(store: TokenStore) -> None:
    clock = Clock()
    old = tokens.create(store, "ada", Role.USER, expires_s=60.0, now=clock).split("_")[1]
    tokens.rotate(store, old, overlap_s=DAY_S, now=clock)
    assert store.read()[old].expires_at == clock.now + 60.0


def test_a_token_that_is_not_there_is_not_rotated(store: TokenStore) -> None:
    with pytest.raises(TokenError, match="there is no token 'abc'"):
        tokens.rotate(store, "abc")
    assert store.read() == {}


def test_a_token_without_an_end_is_read_by_services_that_know_none(store: TokenStore) -> None:
    tokens.create(store, "ada", Role.USER)
    (token,) = store.read().values()
    assert "expires_at" not in token.row()


def test_an_expired_token_gets_401_over_http_with_its_id(
    manager: GPUResourceManager, kept: Persistence
) -> None:
    ended = tokens.create(kept.tokens, "ada", Role.OPERATOR, expires_s=1.0, now=lambda: time.time() - 2)
    service = standalone(manager, kept)
    client = create_app(service).test_client()
    headers = {"Authorization": f"Bearer {ended}"}
    refused = client.get("/api/status", headers=headers)
    assert (refused.status_code, ended.split("_")[1] in json_of(refused)["detail"]) == (401, True)
    assert client.get("/livez", headers=headers).status_code == 200
    page = client.post("/login", data={"token": ended})
    assert (page.status_code, "has expired" in page.get_data(as_text=True)) == (401, True)
    service.watch.close()


def test_a_session_ends_with_its_token(service: Service, kept: Persistence, clock: Clock) -> None:
    text = tokens.create(kept.tokens, "ada", Role.READER, expires_s=3600.0)
    browser = create_app(service).test_client()
    assert browser.post("/login", data={"token": text}).status_code == 303
    assert browser.get("/api/status").status_code == 200
    clock.now += 3601
    assert browser.get("/api/status").status_code == 401


def test_a_use_that_cannot_be_noted_fails_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(TokenFile):
        def note_use(self, token_id: str, at: float) -> None:
            raise StoreUnavailableError("the disk is full")

    store = Full(tmp_path / "tokens.json")
    text = tokens.create(store, "ada", Role.USER)
    assert TokenAuthenticator(store, MemorySessions()).identify(bearer(text)) is not None
    assert "is not noted: the disk is full" in caplog.text


def test_a_link_to_the_file_of_tokens_stays_one(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    link, file = tmp_path / "tokens.json", tmp_path / "secrets" / "tokens.json"
    link.symlink_to(file)
    for number, name in enumerate(("ada", "ben"), 1):
        tokens.create(TokenFile(link), name, Role.USER)
        assert link.is_symlink()
        assert len(TokenFile(file).read()) == number


def test_a_use_reads_the_tokens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of them all for each that was used would take seconds of every few where agents have many."""
    store = TokenFile(tmp_path / "tokens.json")
    ids = [tokens.create(store, "ada", Role.USER).split("_")[1] for _ in range(5)]
    for token_id in ids:
        store.note_use(token_id, 1.0)
    opened: list[Path] = []
    open_path = Path.open

    def counted(path: Path, *how: Any, **more: Any) -> Any:
        opened.append(path)
        return open_path(path, *how, **more)

    monkeypatch.setattr(Path, "open", counted)
    store.note_use(ids[0], 2.0)
    assert opened.count(tmp_path / "tokens.json") == 1
    assert store.last_uses() == {**dict.fromkeys(ids, 1.0), ids[0]: 2.0}


@pytest.mark.parametrize("open_to", ["", "loopback"])
@pytest.mark.parametrize(
    ("text", "mode"), [(b"[{", 0o600), (b"\xff\xfe[\x00", 0o600), (b"[" * 100_000, 0o600), (b"[]", 0o622)]
)
def test_a_broken_file_of_tokens_leaves_the_service_live(
    text: bytes, mode: int, open_to: str, manager: GPUResourceManager, kept: Persistence, tmp_path: Path
) -> None:
    """Else whoever restarts what is not live has a service that does not start, in the place of one error."""
    service = standalone(manager, kept, open_to=open_to)
    client = create_app(service).test_client()
    file = tmp_path / "tokens.json"
    file.write_bytes(text)
    file.chmod(mode)
    assert [client.get(path).status_code for path in (*HEALTH, "/login")] == [200] * 4
    refused = client.get("/api/status", headers={"Authorization": "Bearer gpm_1_2"})
    assert (refused.status_code, json_of(refused)["detail"]) == (
        500,
        "the manager failed: see the log of the service",
    )
    file.chmod(0o600)
    file.write_bytes(b"[]")
    assert client.get("/api/status").status_code == (200 if open_to else 401)
    service.watch.close()


@pytest.mark.parametrize("open_to", ["loopback", "everyone"])
def test_a_service_that_started_without_tokens_refuses_everybody_once_there_is_one(
    open_to: str, manager: GPUResourceManager, kept: Persistence, clock: Clock
) -> None:
    """Who makes a token believes that callers need one: all were operators until the next start."""
    service = standalone(manager, kept, open_to=open_to, clock=clock)
    client = create_app(service).test_client()
    assert client.get("/api/status").status_code == 200
    text = tokens.create(kept.tokens, "ada", Role.OPERATOR)
    clock.now += 2 * TOKEN_CACHE_S
    for headers in ({}, {"Authorization": f"Bearer {text}"}):
        answer = client.get("/api/status", headers=headers)
        assert (answer.status_code, answer.get_json()["detail"]) == (
            401,
            "this service was started without tokens, and there are some now: start it again",
        )
    service.watch.close()


@pytest.mark.parametrize("open_to", ["loopback", "everyone"])
def test_a_service_that_a_token_closed_stays_closed_until_it_is_started_again(
    open_to: str, manager: GPUResourceManager, kept: Persistence, clock: Clock
) -> None:
    """Else the end of the last token, or a store that lost them, made everybody an operator."""
    service = standalone(manager, kept, open_to=open_to, clock=clock)
    client = create_app(service).test_client()
    tokens.create(kept.tokens, "ada", Role.USER)
    assert client.get("/api/status").status_code == 401
    [token_id] = kept.tokens.read()
    kept.tokens.delete(token_id)
    clock.now += 2 * TOKEN_CACHE_S
    assert client.get("/api/status").status_code == 401
    service.watch.close()


@pytest.mark.parametrize("open_to", ["loopback", "everyone"])
@pytest.mark.parametrize("expires_s", [None, 1.0])
def test_the_token_of_an_agent_closes_no_service_and_its_use_is_noted(
    open_to: str, expires_s: float | None, manager: GPUResourceManager, kept: Persistence, clock: Clock
) -> None:
    """`agent install` made one and waited for its use: everybody was refused, running tasks included."""
    service = standalone(manager, kept, open_to=open_to, clock=clock)
    client = create_app(service).test_client()
    text = tokens.create(kept.tokens, "agent of a", Role.AGENT, server="a", expires_s=expires_s, now=clock)
    clock.now += 2 * TOKEN_CACHE_S
    for headers in ({}, {"Authorization": f"Bearer {text}"}):
        assert client.get("/api/status", headers=headers).status_code == 200
    assert list(kept.tokens.last_uses().values()) == ([clock.now] if expires_s is None else [])
    service.watch.close()
