"""Pages with hostile names in a real browser: no name runs as script, and the pages still work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import browser as b
from tests.security import hostile

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[b.Service]:
    folder: Path = tmp_path_factory.mktemp("xss")
    with b.serving(folder, 8, "--airflow-url", "http://airflow.example") as service:
        with service.client("olga") as olga:
            for name in hostile.PAGES:
                labels = {"dag_id": name, "run_id": name, "task_id": name, "launcher": name}
                payload = {
                    "task_id": name,
                    "required_gpus": 8,
                    "required_cpus": 1,
                    "team": name,
                    "owner": name,
                }
                olga.post("/api/submit", json={**payload, "labels": labels}).raise_for_status()
                waits = {**payload, "task_id": f"{name} waits", "labels": labels}
                olga.post("/api/submit", json=waits).raise_for_status()
            for server, name in enumerate(hostile.PAGES):
                body = {"reason": name, "failed": bool(server % 2)}
                olga.post(f"/api/servers/{server}/drain", json=body).raise_for_status()
        yield service


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with b.chromium() as browser:
        yield browser


def test_no_name_runs_as_script(chromium: Any, service: b.Service) -> None:
    context = chromium.new_context()
    page = context.new_page()
    complaints: list[str] = []
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    b.log_in(page, service, "olga")
    queries = ["", *(f"?q={name}" for name in hostile.PAGES)]
    visits = [(path, query) for path in ("/", "/leases", "/queue") for query in queries]
    visits += [("/what-if", f"?required_gpus={name}") for name in hostile.PAGES[:3]]
    for path, query in visits:
        page.goto(f"{service.url}{path}{query}")
        for button in page.locator("main summary, main [popovertarget]").all()[:1]:
            button.click()
        for focusable in page.locator("main input, main a, main button").all()[:10]:
            if focusable.is_visible():
                focusable.hover(force=True)
        assert page.evaluate("window.pwned") is None, (path, query)
        b.expect(page.locator("iframe, svg[onload], img[onerror], [onfocus]")).to_have_count(0)
        b.expect(page.locator("a[href^='javascript:']")).to_have_count(0)
    context.close()
    assert [text for text in complaints if "400" not in text] == []


def test_the_names_are_shown_unchanged(chromium: Any, service: b.Service) -> None:
    context = chromium.new_context()
    page = context.new_page()
    b.log_in(page, service, "vera")
    shown = ""
    for path in ("/leases", "/queue"):
        page.goto(f"{service.url}{path}")
        shown += page.locator("main").inner_text()
    assert all(name in shown and f"{name} waits" in shown for name in hostile.PAGES)
    page.goto(f"{service.url}/")
    text = page.locator("main").inner_text()
    assert all(name in text for name in hostile.PAGES)
    context.close()
