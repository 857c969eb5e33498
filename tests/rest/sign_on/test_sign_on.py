"""Sign-on at a provider that runs: what it lets in, and what it must not."""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient
from joserfc.jwk import OctKey, RSAKey
from werkzeug.serving import make_server

from resource_manager import GPUResourceManager
from resource_manager.cli import main
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.auth import MAX_LOG_INS
from resource_manager.rest.service import Service
from resource_manager.rest.sign_on.provider import MAX_AT_ONCE
from resource_manager.rest.tokens import Role
from tests.eventually import wait_for
from tests.rest.sign_on.openid_provider import CLIENT, OpenIdProvider

GROUPS = {"gpu-users": {"role": "user", "teams": ["vision"]}, "ops": {"role": "operator"}}


@pytest.fixture
def provider() -> Iterator[OpenIdProvider]:
    with OpenIdProvider() as provider:
        yield provider


def configure(manager: GPUResourceManager, provider: OpenIdProvider, **more: Any) -> None:
    section = {"issuer": provider.issuer, "client_id": CLIENT, "groups": GROUPS, **more}
    manager.apply(ClusterForm.model_validate({"sign_on": section}))


@pytest.fixture
def browser(
    manager: GPUResourceManager, kept: Persistence, provider: OpenIdProvider
) -> Iterator[FlaskClient]:
    configure(manager, provider)
    service = standalone(manager, kept)
    yield create_app(service).test_client()
    service.watch.close()


def at_provider(browser: FlaskClient, **query: str) -> str:
    """Begin a log-in and return the address with which the provider sends the browser back."""
    begun = browser.get("/sign-on", query_string=query)
    assert begun.status_code == 303, begun.get_data(as_text=True)
    return httpx.get(begun.headers["Location"]).headers["Location"]


def log_in(browser: FlaskClient, **query: str) -> Any:
    return browser.get(at_provider(browser, **query))


def test_a_person_logs_in_and_has_the_rights_of_their_groups(browser: FlaskClient) -> None:
    assert "/sign-on" in browser.get("/login").get_data(as_text=True)
    answer = log_in(browser)
    assert answer.status_code == 200, answer.get_data(as_text=True)
    who = browser.get("/api/caller").json
    assert who == {"name": "ada", "role": "user", "teams": ["vision"]}
    assert browser.get("/login").status_code == 200


def test_rights_add_up_and_a_group_without_teams_allows_any(
    browser: FlaskClient, manager: GPUResourceManager, provider: OpenIdProvider
) -> None:
    groups = {
        "readers": {"role": "reader"},
        "vision": {"role": "user", "teams": ["vision"]},
        "speech": {"role": "user", "teams": ["speech", "vision"]},
        "staff": {"role": "user"},
        "ops": {"role": "operator"},
    }
    configure(manager, provider, groups=groups)
    for theirs, role, teams in (
        (["readers", "unknown"], "reader", []),
        (["readers", "vision"], "user", ["vision"]),
        (["vision", "speech"], "user", ["speech", "vision"]),
        (["vision", "staff"], "user", []),
        (["ops"], "operator", []),
        ("ops", "operator", []),
    ):
        provider.person["groups"] = theirs
        assert log_in(browser).status_code == 200
        assert browser.get("/api/caller").json == {"name": "ada", "role": role, "teams": teams}


def refused(answer: Any) -> str:
    """Return why the page says that the log-in is refused."""
    text = answer.get_data(as_text=True)
    assert answer.status_code == 403, text
    assert not any("gpu_manager_session" in each for each in answer.headers.getlist("Set-Cookie"))
    [reason] = re.findall(r'role="alert">(.*?)</p>', text)
    return html.unescape(reason)


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"aud": "another"}, "is for another service"),
        ({"aud": ["another", "third"]}, "is for another service"),
        ({"aud": [CLIENT, "another"], "azp": "another"}, "is for another service"),
        ({"aud": None}, "is for another service"),
        ({"iss": "http://127.0.0.1:1/evil"}, "is another provider's"),
        ({"nonce": "of-an-older-log-in"}, "is of another log-in"),
        ({"nonce": None}, "is of another log-in"),
        ({"exp": 1}, "has expired"),
        ({"at_hash": "AAAA"}, "at_hash"),
        ({"sub": None}, "sub"),
        ({"preferred_username": None}, "no name of a person in preferred_username"),
        ({"preferred_username": ["ada"]}, "no name of a person in preferred_username"),
        ({"groups": None}, "no group in groups"),
        ({"groups": ["strangers", 7]}, "names no group of ada, who is in strangers"),
        ({"groups": "strangers"}, "names no group of ada, who is in strangers"),
        ({"groups": {"ops": True}}, "no group in groups"),
    ],
)
def test_what_an_id_token_must_say(
    browser: FlaskClient, provider: OpenIdProvider, claims: dict[str, Any], why: str
) -> None:
    provider.claims = claims
    assert why in refused(log_in(browser))
    assert browser.get("/api/caller").status_code == 401


@pytest.mark.parametrize("name", ["a" * 101, "ada\u202e", "ada\n"])
def test_a_name_that_owns_nothing_is_refused_in_one_line(
    browser: FlaskClient, provider: OpenIdProvider, name: str
) -> None:
    provider.person["preferred_username"] = name
    answer = log_in(browser)
    assert answer.status_code == 403, answer.get_data(as_text=True)


def test_an_unverified_address_is_no_name(
    browser: FlaskClient, manager: GPUResourceManager, provider: OpenIdProvider
) -> None:
    configure(manager, provider, name_claim="email")
    provider.person["email"] = "ada@example.org"
    assert "has not verified that ada@example.org" in refused(log_in(browser))
    provider.person["email_verified"] = True
    assert log_in(browser).status_code == 200


@pytest.mark.parametrize(("ahead_s", "is_let_in"), [(50, True), (-340, True), (90, False), (-400, False)])
def test_clocks_may_differ_by_a_minute(
    browser: FlaskClient, provider: OpenIdProvider, ahead_s: float, is_let_in: bool
) -> None:
    """The ID token lives for five minutes."""
    provider.clock_ahead_s = ahead_s
    answer = log_in(browser)
    if is_let_in:
        assert answer.status_code == 200
    else:
        assert "are the clocks of the provider and of this service right?" in refused(answer)


def test_a_new_key_is_fetched_and_a_foreign_or_weaker_one_is_refused(
    browser: FlaskClient, provider: OpenIdProvider
) -> None:
    assert log_in(browser).status_code == 200
    provider.rotate_keys()
    assert log_in(browser).status_code == 200
    assert provider.asked.count("/realm/keys") == 2
    assert log_in(browser).status_code == 200
    assert provider.asked.count("/realm/keys") == 2
    published = provider.keys
    same_id: Any = {"kid": published[0].kid}
    provider.signing = RSAKey.generate_key(2048, same_id)
    assert "is not signed by any of its keys" in refused(log_in(browser))
    provider.signing, provider.algorithm = OctKey.import_key("x" * 32, same_id), "HS256"
    assert "HS256" in refused(log_in(browser)) or "algorithm" in refused(log_in(browser))


def test_a_key_that_cannot_be_read_keeps_nobody_out(browser: FlaskClient, provider: OpenIdProvider) -> None:
    unreadable: list[Any] = [
        {"kty": "EC", "crv": "P-999", "x": "aa", "y": "bb"},
        {"kty": "RSA", "n": "!"},
        {},
        "key",
    ]
    provider.other_keys.extend(unreadable)
    assert log_in(browser).status_code == 200
    provider.rotate_keys()
    provider.keys.clear()
    provider.signing = RSAKey.generate_key(2048, {"kid": "new"})
    assert "its keys cannot be read" in refused(log_in(browser))


def test_a_log_in_may_end_at_a_service_whose_clock_is_behind(
    browser: FlaskClient, set_wall_clock: Any
) -> None:
    set_wall_clock(lambda now: now + 30.0)
    back = at_provider(browser)
    set_wall_clock(lambda now: now)
    assert browser.get(back).status_code == 200


def test_a_log_in_ends_once_and_in_the_browser_that_began_it(
    browser: FlaskClient, provider: OpenIdProvider
) -> None:
    provider.repeats_codes = True  # so that only the service can refuse
    back = at_provider(browser)
    cookie = browser.get_cookie("gpu_manager_sign_on", path="/signed-on")
    assert cookie is not None
    assert (cookie.http_only, cookie.same_site, cookie.max_age) == (True, "Lax", 600)
    other = browser.application.test_client()
    assert "begun in another browser" in refused(other.get(back))
    at_provider(other)
    assert "not the one that this browser began last" in refused(other.get(back))
    assert browser.get(back).status_code == 200
    assert browser.get_cookie("gpu_manager_sign_on", path="/signed-on") is None
    browser.set_cookie("gpu_manager_sign_on", cookie.value, path="/signed-on")
    assert "is over already" in refused(browser.get(back))
    browser.set_cookie("gpu_manager_sign_on", "forged", path="/signed-on")
    assert "begun in another browser" in refused(browser.get(back))


def test_a_code_of_another_log_in_is_refused_by_its_challenge(browser: FlaskClient) -> None:
    other = browser.application.test_client()
    stolen = parse_qs(urlsplit(at_provider(other)).query)["code"][0]
    mine = urlsplit(at_provider(browser))
    state = parse_qs(mine.query)["state"][0]
    answer = browser.get("/signed-on", query_string={"code": stolen, "state": state})
    assert "invalid_grant: wrong verifier" in refused(answer)


def test_the_answer_of_another_provider_and_a_refusal_are_told(browser: FlaskClient) -> None:
    state = parse_qs(urlsplit(at_provider(browser)).query)["state"][0]
    query = {"state": state, "code": "x", "iss": "http://127.0.0.1:1/evil"}
    assert "another provider answered" in refused(browser.get("/signed-on", query_string=query))
    query = {"state": state, "error": "access_denied"}
    assert "the provider says 'access_denied'" in refused(browser.get("/signed-on", query_string=query))


FOREIGN = (
    "https://evil.example",
    "//evil.example",
    "/\\evil.example",
    "\\/evil.example",
    "javascript:alert(1)",
    "/\t/evil.example",
    "http:/evil.example",
    "evil.example",
    "//[evil.example",
)


@pytest.mark.parametrize("destination", FOREIGN)
def test_no_log_in_leads_to_another_site(browser: FlaskClient, destination: str) -> None:
    text = log_in(browser, next=destination).get_data(as_text=True)
    assert 'content="0; url=/"' in text
    assert "evil" not in text
    assert "alert" not in text


def test_one_comes_to_the_page_that_one_asked_for(browser: FlaskClient) -> None:
    refused_page = browser.get("/lease?id=a/b&x=%22%3E")
    assert refused_page.status_code == 303
    page = browser.get(refused_page.headers["Location"]).get_data(as_text=True)
    [link] = re.findall(r'href="(/sign-on[^"]*)"', page)
    back = httpx.get(browser.get(html.unescape(link)).headers["Location"]).headers["Location"]
    text = html.unescape(browser.get(back).get_data(as_text=True))
    assert 'url=/lease?id=a/b&x=%22%3E"' in text


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"issuer": "https://other.example"}, "calls itself https://other.example"),
        ({"token_endpoint": "http://evil.example/token"}, "token_endpoint does not begin with https://"),
        ({"jwks_uri": None}, "it has no jwks_uri"),
        ({"authorization_endpoint": "https://[::1/"}, "authorization_endpoint is no address"),
        ({"token_endpoint": "https://login.example:port/"}, "token_endpoint is no address"),
    ],
)
def test_a_provider_that_is_set_up_wrongly_is_one_line(
    browser: FlaskClient, provider: OpenIdProvider, metadata: dict[str, Any], why: str
) -> None:
    provider.metadata = metadata
    answer = browser.get("/sign-on")
    if answer.status_code == 303:
        answer = browser.get(httpx.get(answer.headers["Location"]).headers["Location"])
    assert answer.status_code == 503
    assert why in html.unescape(answer.get_data(as_text=True))


def test_an_issuer_that_leads_to_a_page_for_people_is_told(
    browser: FlaskClient, manager: GPUResourceManager, provider: OpenIdProvider
) -> None:
    configure(manager, provider, issuer=f"{provider.issuer}s")
    answer = browser.post("/api/login").get_json()
    assert answer["detail"].endswith("/realms/.well-known/openid-configuration answers with status 404")


@pytest.mark.parametrize("issuer", ["https://login.example.org:port", "https://login.example.org:0/"])
def test_an_issuer_with_a_wrong_port_is_refused(
    manager: GPUResourceManager, provider: OpenIdProvider, issuer: str
) -> None:
    with pytest.raises(ValueError, match=r"sign_on\.issuer"):
        configure(manager, provider, issuer=issuer)


def test_an_issuer_whose_host_is_no_name_is_one_line(
    browser: FlaskClient, manager: GPUResourceManager, provider: OpenIdProvider
) -> None:
    configure(manager, provider, issuer="https://login\u2603.example.org")
    answer = browser.post("/api/login")
    assert (answer.status_code, "Invalid IDNA hostname" in answer.get_json()["detail"]) == (503, True)


def test_a_provider_that_hangs_has_few_threads(browser: FlaskClient, provider: OpenIdProvider) -> None:
    """Else strangers who ask for log-ins would have them all, and no lease would be renewed."""
    goes_on = threading.Event()
    provider.before_answer = lambda: goes_on.wait(30)
    clients = [browser.application.test_client() for _ in range(MAX_AT_ONCE)]
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        waiting = [pool.submit(client.get, "/sign-on") for client in clients]
        try:
            wait_for(lambda: len(provider.asked) == MAX_AT_ONCE)
            one_more = browser.post("/api/login")
        finally:
            goes_on.set()
    assert (one_more.status_code, one_more.headers["Retry-After"]) == (503, "5")
    assert "log-ins wait for its answer already" in one_more.get_json()["detail"]
    assert {each.result().status_code for each in waiting} == {303}
    assert browser.post("/api/login").status_code == 200


def test_a_provider_that_is_out_is_one_line_and_tokens_go_on(
    browser: FlaskClient, kept: Persistence, provider: OpenIdProvider
) -> None:
    provider.__exit__()
    answer = browser.get("/sign-on")
    assert (answer.status_code, "cannot log anybody in" in answer.get_data(as_text=True)) == (503, True)
    begun = browser.post("/api/login")
    assert (begun.status_code, begun.headers["Retry-After"]) == (503, "5")
    token = tokens.create(kept.tokens, "bob", Role.READER)
    assert browser.get("/api/caller", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    provider.__enter__()


def test_without_a_section_there_is_no_sign_on(service: Service) -> None:
    stranger = create_app(service).test_client()
    assert stranger.get("/sign-on").status_code == stranger.post("/api/login").status_code == 404
    assert "/sign-on" not in stranger.get("/login").get_data(as_text=True)


def test_logging_out_ends_the_session_and_what_is_over_is_dropped(
    browser: FlaskClient, kept: Persistence, provider: OpenIdProvider
) -> None:
    log_in(browser)
    [token] = kept.tokens.read().values()
    assert (token.name, token.subject) == ("ada", "4711")
    assert token.expires_at is not None
    kept.tokens.put(replace(token, expires_at=1.0))
    assert browser.get("/api/caller", headers={"Authorization": "Bearer x"}).status_code == 401
    log_in(browser)
    assert list(kept.tokens.read()) != [token.token_id]
    assert len(kept.tokens.read()) == 1
    page = browser.get("/").get_data(as_text=True)
    [csrf] = re.findall(r'data-csrf="([^"]+)"', page)
    browser.post("/logout", data={"csrf_token": csrf})
    assert browser.get("/api/caller").status_code == 401


def test_a_person_has_no_more_log_ins_than_every_call_can_read(
    browser: FlaskClient, kept: Persistence, provider: OpenIdProvider
) -> None:
    other = tokens.create(kept.tokens, "ada", Role.USER)
    kept_before, first = set(kept.tokens.read()), ""
    for _ in range(MAX_LOG_INS + 2):
        assert log_in(browser).status_code == 200
        first = first or next(iter(kept.tokens.read().keys() - kept_before))
    assert first not in kept.tokens.read()
    assert len(kept.tokens.read()) == 1 + MAX_LOG_INS
    assert browser.get("/api/caller").status_code == 200
    assert tokens.find(kept.tokens.read(), other) is not None


@pytest.fixture
def served(browser: FlaskClient) -> Iterator[str]:
    """Yield the address of the service, as a real server."""
    server = make_server("127.0.0.1", 0, browser.application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def gpu_manager(url: str, home: Path, *args: str) -> Any:
    environment = {"GPU_MANAGER_URL": url, "XDG_CONFIG_HOME": str(home)}
    return CliRunner().invoke(main, args, env=environment)


def test_the_command_line_logs_in_and_out(served: str, provider: OpenIdProvider, tmp_path: Path) -> None:
    provider.confirms = True
    before = gpu_manager(served, tmp_path, "status")
    assert (before.exit_code, "gpu-manager login" in before.output) == (1, True)
    done = gpu_manager(served, tmp_path, "login")
    assert done.exit_code == 0, done.output
    [code] = provider.logged_in
    assert f"open {provider.issuer}/device in a browser and confirm the code {code}" in done.output
    assert "logged in as ada (user) until 20" in done.output
    file = tmp_path / "gpu-manager" / "log-ins.json"
    assert file.stat().st_mode & 0o777 == 0o600
    [token] = (entry["token"] for entry in json.loads(file.read_text()).values())
    assert token not in done.output
    assert gpu_manager(served + "/", tmp_path, "status").exit_code == 0
    assert gpu_manager(served, tmp_path, "logout").output == "logged out\n"
    assert json.loads(file.read_text()) == {}
    assert httpx.get(f"{served}/api/caller", headers={"Authorization": f"Bearer {token}"}).status_code == 401
    assert gpu_manager(served, tmp_path, "logout").exit_code == 1


def test_errors_of_the_command_line_are_one_line(
    served: str, provider: OpenIdProvider, tmp_path: Path
) -> None:
    assert "--url" in CliRunner().invoke(main, ["login"], env={"GPU_MANAGER_URL": ""}).output
    provider.person["groups"] = ["strangers"]
    provider.logged_in = _Anybody()
    wrong = gpu_manager(served, tmp_path, "login")
    why = "[sign_on.groups] names no group of ada, who is in strangers"
    assert wrong.output.splitlines()[-1] == f"Error: the log-in is refused: {why}"
    assert wrong.exit_code == 1
    provider.logged_in = set()
    made = httpx.post(f"{served}/api/login/token", json={"device_code": "made up"})
    assert (made.status_code, "invalid_grant" in made.json()["detail"]) == (403, True)
    (tmp_path / "gpu-manager").mkdir()
    (tmp_path / "gpu-manager" / "log-ins.json").write_text("{")
    (tmp_path / "gpu-manager" / "log-ins.json").chmod(0o600)
    wrong = gpu_manager(served, tmp_path, "status")
    assert (wrong.exit_code, "not a file of log-ins" in wrong.output) == (2, True)


class _Anybody(set[str]):
    def __contains__(self, code: object) -> bool:
        return True


def test_a_provider_without_log_ins_by_device_is_told(
    served: str, provider: OpenIdProvider, tmp_path: Path
) -> None:
    provider.metadata = {"device_authorization_endpoint": None}
    wrong = gpu_manager(served, tmp_path, "login")
    assert (wrong.exit_code, "no device_authorization_endpoint" in wrong.output) == (3, True)


def test_a_service_with_a_secret_proves_itself(
    manager: GPUResourceManager, kept: Persistence, provider: OpenIdProvider
) -> None:
    configure(manager, provider)
    provider.client_secret = "s3cret"
    for secret, status in (("s3cret", 200), ("other", 403)):
        service = standalone(manager, kept, client_secret=secret)
        answer = log_in(create_app(service).test_client())
        assert answer.status_code == status, answer.get_data(as_text=True)
        service.watch.close()


def test_behind_https_the_provider_is_given_an_https_address(
    manager: GPUResourceManager, kept: Persistence, provider: OpenIdProvider
) -> None:
    configure(manager, provider)
    service = standalone(manager, kept)
    browser = create_app(service, secure_cookies=True).test_client()
    begun = browser.get("/sign-on", headers={"Host": "gpus.example.org"})
    query = parse_qs(urlsplit(begun.headers["Location"]).query)
    assert query["redirect_uri"] == ["https://gpus.example.org/signed-on"]
    assert "Secure" in begun.headers["Set-Cookie"]
    service.watch.close()


def test_a_stranger_cannot_flood_the_provider(browser: FlaskClient) -> None:
    statuses = {browser.get("/sign-on").status_code for _ in range(310)}
    assert statuses == {303, 429}
