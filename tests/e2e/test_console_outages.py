"""Console of a page that stays open: answers that are lost, and a session that ends meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import browser as b

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[b.Service]:
    with b.serving(tmp_path_factory.mktemp("outages"), 4) as service:
        yield service


@pytest.fixture
def page(service: b.Service) -> Iterator[Any]:
    with b.chromium() as browser:
        page = browser.new_context(viewport={"width": 1440, "height": 800}).new_page()
        b.log_in(page, service, "olga")
        b.expect(page.get_by_text("Live", exact=True)).to_be_visible()
        yield page


def allocate(service: b.Service, task_id: str, server_id: int) -> None:
    with service.client("olga") as olga:
        body = {"task_id": task_id, "gpus": 4, "server": server_id}
        olga.post("/api/allocate", json=body).raise_for_status()


@pytest.mark.parametrize("status", [0, 503])
def test_a_change_whose_answer_was_lost_is_shown_once_the_service_answers(
    page: Any, service: b.Service, status: int
) -> None:
    lost: list[str] = []

    def lose(route: Any) -> None:
        if lost:
            route.continue_()
            return
        lost.append(route.request.url)
        if status:
            route.fulfill(status=status, body="<html>out</html>", content_type="text/html")
        else:
            route.abort()

    page.route("**/fragments/servers*", lose)
    allocate(service, f"lost{status}", 1 if status else 2)
    b.expect(page.locator(f".cell[data-task=lost{status}]")).to_have_count(1)
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()
    assert lost


def test_what_somebody_types_stays_when_the_session_ends(page: Any, service: b.Service) -> None:
    row = page.locator("#server-0")
    row.get_by_text("Drain…").click()
    row.get_by_label("Reason").fill("new fan")
    other = page.context.new_page()
    other.goto(f"{service.url}/queue")
    other.get_by_role("button", name="Log out").click()
    allocate(service, "meanwhile", 1)
    b.expect(page.get_by_text("Offline", exact=True)).to_be_visible()
    b.expect(row.get_by_label("Reason")).to_have_value("new fan")
    row.get_by_role("button", name="Drain gpu-server-0").click()
    b.expect(page.get_by_text("Nothing was done: you are not logged in any more.")).to_be_visible()


def test_a_page_whose_session_has_ended_leads_to_the_log_in(page: Any, service: b.Service) -> None:
    other = page.context.new_page()
    other.goto(f"{service.url}/queue")
    other.get_by_role("button", name="Log out").click()
    allocate(service, "after", 3)
    b.expect(page).to_have_url(re.compile("/login"))


def test_the_page_of_a_server_that_has_left_says_so(page: Any, service: b.Service) -> None:
    """It showed free GPUs and "Offline: reconnecting" for ever."""

    def have(count: int) -> None:
        servers = [{"name": "gpu-server-{id}", "count": count, "gpus": 8, "gpu_type": "A100", "cpus": 64}]
        with service.client("olga") as olga:
            olga.put("/api/cluster", json={"sections": {"servers": servers}}).raise_for_status()

    have(5)
    page.goto(f"{service.url}/servers/4")
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()
    have(4)
    b.expect(page.get_by_text("server 4 is not in the inventory")).to_be_visible()


def test_a_page_that_the_browser_brings_back_is_loaded_again(page: Any) -> None:
    """Its stream was closed when it was left, and it said "Live" of what it showed then."""
    page.evaluate("window.old = true")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    page.wait_for_function("window.old === undefined")
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()


STREAMS = """window.streams = [];
window.EventSource = class extends EventSource { constructor(url) { super(url); streams.push(this); } };"""
"""Script that notes the streams of a page."""

SHOWN = """isShown => {
    Object.defineProperty(document, "hidden", {value: !isShown, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
    return streams.map(stream => stream.readyState === EventSource.CLOSED);
}"""
"""Script that shows or hides a page as a choice of tabs does, and returns which streams are closed."""


def test_a_page_that_nobody_sees_follows_nothing_and_is_current_once_it_is_seen(
    page: Any, service: b.Service
) -> None:
    """Six tabs of a browser had all connections to the service: no seventh page was loaded."""
    page.add_init_script(STREAMS)
    page.reload()
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()
    assert page.evaluate(SHOWN, False) == [True]
    allocate(service, "unseen", 0)
    assert page.evaluate(SHOWN, True) == [True, False]
    b.expect(page.locator(".cell[data-task=unseen]")).to_have_count(1)
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()


def test_a_stream_that_lasts_longer_than_the_service_lets_it_is_opened_again(
    page: Any, service: b.Service
) -> None:
    """Its connection is gone without a word, as after a laptop's sleep: the page said "Live"."""
    page.clock.install()
    page.add_init_script(STREAMS)
    page.reload()
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()
    page.clock.run_for(320_000)
    assert page.evaluate("streams.length") == 1
    page.clock.run_for(30_000)
    assert page.evaluate("streams.map(stream => stream.readyState === EventSource.CLOSED)") == [True, False]


@pytest.mark.parametrize("path", ["/", "/timeline", "/queue"])
def test_a_page_is_drawn_each_minute_though_nothing_changes(page: Any, service: b.Service, path: str) -> None:
    """The timeline's line of now stood still, and a maintenance window began unseen."""
    page.clock.install()
    page.goto(service.url + path)
    b.expect(page.get_by_text("Live", exact=True)).to_be_visible()
    with page.expect_response(service.url + path):
        page.clock.run_for(65_000)


def test_that_a_page_is_live_is_said_once(page: Any, service: b.Service) -> None:
    """A reader of the screen said it again after each change."""
    page.evaluate("new MutationObserver(() => window.again = true).observe(live, {childList: true})")
    before = page.locator("#totals").text_content()
    with service.client("olga") as olga:
        olga.post("/api/servers/2/drain", json={"reason": "fan"}).raise_for_status()
    page.wait_for_function("before => document.querySelector('#totals').textContent !== before", arg=before)
    assert page.evaluate("window.again") is None
