"""Sign-on in a real browser: the service, and a provider on another site that sends the browser back."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import browser as b
from tests.rest.sign_on.openid_provider import CLIENT, OpenIdProvider

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def provider() -> Iterator[OpenIdProvider]:
    """A provider whose site differs from that of the service, as for everybody's own."""
    with OpenIdProvider() as provider:
        provider.issuer = provider.issuer.replace("127.0.0.1", "localhost")
        yield provider


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, provider: OpenIdProvider) -> Iterator[b.Service]:
    folder = tmp_path_factory.mktemp("sign-on")
    with b.serving(folder, 1) as service:
        provider.redirect_uris = (f"{service.url}/signed-on",)
        section = folder / "sign-on.toml"
        section.write_text(
            f'[sign_on]\nissuer = "{provider.issuer}"\nclient_id = "{CLIENT}"\n'
            '[sign_on.groups.gpu-users]\nrole = "user"\n'
        )
        command = [sys.executable, "-m", "resource_manager.cli", "--url", service.url]
        command += ["--token", service.tokens["olga"], "apply", "--yes", str(section)]
        subprocess.run(command, check=True, capture_output=True)
        yield service


@pytest.fixture
def page() -> Iterator[Any]:
    """Page of a new browser."""
    with b.chromium() as chromium:
        yield chromium.new_context(viewport={"width": 1200, "height": 800}).new_page()


def sign_on(page: Any) -> None:
    link = page.get_by_role("link", name=re.compile("^Log in with "))
    b.expect(link).to_be_visible()
    link.click()


def test_a_person_comes_back_to_the_page_they_asked_for_until_they_log_out(
    page: Any, service: b.Service
) -> None:
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{service.url}/queue")
    sign_on(page)
    b.expect(page.get_by_role("heading", name=re.compile("Queue|Pending"))).to_be_visible()
    assert page.url == f"{service.url}/queue"
    cookies = {cookie["name"]: cookie for cookie in page.context.cookies()}
    session = cookies["gpu_manager_session"]
    assert (session["httpOnly"], session["sameSite"]) == (True, "Strict")
    b.picture(page, "signed-on")
    assert problems == []
    page.get_by_role("button", name="Log out").click()
    b.expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    page.goto(f"{service.url}/queue")
    b.expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_a_stranger_of_the_provider_is_told_why(
    page: Any, service: b.Service, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(provider.person, "groups", ["visitors"])
    page.goto(f"{service.url}/")
    sign_on(page)
    b.expect(page.get_by_role("alert")).to_contain_text("names no group of ada, who is in visitors")
    assert not [cookie for cookie in page.context.cookies() if cookie["name"] == "gpu_manager_session"]
