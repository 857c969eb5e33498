"""Pages with hostile names in a real browser: no name runs as script, and the pages still work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from resource_manager.rest import tokens
from resource_manager.rest.tokens import Role, TokenFile
from tests.agent.reporting import as_text, gpu, process, report
from tests.e2e import browser as b
from tests.manager.test_slurm_jobs import slurm_job
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
                told = slurm_job(
                    server, time.time(), **dict.fromkeys(SAID_BY_SLURM, name), labels={name: name}
                )
                olga.post("/api/slurm", json={"cluster": f"c{server}", "jobs": [told]}).raise_for_status()
                demand = {"task_id": f"{name}/x", "gpus": 1, "team": name, "after": [name]}
                olga.post("/api/announce", json=demand).raise_for_status()
                report_of(service, folder, server, name)
        yield service


SAID_BY_SLURM = ("id", "task_id", "owner", "team", "state", "reason", "wait", "where", "partition")


def report_of(service: b.Service, folder: Path, server: int, name: str) -> None:
    """Send the report of an agent in which every text is this name."""
    said = f"gpu-server-{server}"
    token = tokens.create(TokenFile(folder / "tokens.json"), name, Role.AGENT, server=said)
    own = gpu(0, type=name, mig=name, throttle_reasons=[name], recovery_action=name, vendor_state=name)
    own["processes"] = [process(5, user=name, command=name, lease_id=name, job=name)]
    value = report(time.time(), own, name=said)
    value |= {"hostname": name, "driver": name, "version": name, "mps_error": name}
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    httpx.post(f"{service.url}/api/reports", content=as_text(value), headers=headers).raise_for_status()


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
    visits += [(path, "") for path in ("/timeline", "/use", "/estimates", "/cluster", "/charts", "/docs")]
    visits += [("/use", f"?by={by}") for by in ("user", "dag", "gpu_type", "source")]
    visits += [(f"/servers/{server}", "") for server in range(8)]
    visits += [("/lease", f"?id={quote(name, safe='')}") for name in hostile.PAGES]
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
